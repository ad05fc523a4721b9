"""Others' layouts of drafters, one file each."""
