"""One file a defect: each fails on the commit before its mend."""
