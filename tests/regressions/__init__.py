"""What users saw, one file a sight: each test fails on the commit before its mend."""
