"""Decides what to run, where, and keeps it: plan, Ray Tune, warm worker groups, the store, the command line."""
