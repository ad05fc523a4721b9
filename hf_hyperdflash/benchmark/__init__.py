"""Measuring drafters: prompt suites, runs, reports, the doctor."""
