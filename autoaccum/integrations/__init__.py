"""Tune and train inside a framework, one file each, imported where it is used: no framework is needed for another one."""
