"""Tests of the study: configuration, data, plan, running."""
