"""What the command and the whole jobs share: archives and rows as files, a plane opened for a command, tables."""
