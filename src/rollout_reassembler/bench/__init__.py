"""`reassemble bench`: how fast groups are finalized here, next to what a user has today.

shapes.py     made-up groups: how many rollouts, calls and tokens; sound digests, from a seed
figures.py    what is measured, as it is in the JSON
machine.py    the machine's part: facts, SHA-256, the peak of memory
counting.py   a data-plane client that counts calls and bytes
ours.py       the arm that is measured: this package
reference.py  the arms that it is compared with: nemo-gym's verifier over some twenty columns a call
staging.py    rows a second through either arm's sink
run.py        the run: all arms in turn on the same rows and the same queue
report.py     figures as tables

All arms finalize the same group, in turns of a few groups, so that whatever else the machine does
meets all alike. Read ratios first, milliseconds second.
"""
