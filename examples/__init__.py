"""Whole models and measurements on real data. `python -m examples.demo` runs them all and writes report/index.html."""
