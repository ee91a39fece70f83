"""`python -m rollout_reassembler` is the `reassemble` command."""

from rollout_reassembler.cli import main

main()
