"""Import every module of the installed distribution from where it was installed, and find its data files."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

DATA = ("engines/catalogue.toml", "profiles/classes.toml")

distribution = importlib.metadata.distribution("midstream")
files = [str(file) for file in distribution.files or ()]
modules = [file for file in files if file.endswith(".py")]
for file in modules:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = importlib.import_module(name).__file__
    if found is None or Path(found) != Path(str(distribution.locate_file(file))):
        sys.exit(f"{name} comes from {found}, not from the wheel")
if len(modules) < 100 or not set(DATA) <= set(files):
    sys.exit(f"the wheel has {len(modules)} modules and lacks {sorted(set(DATA) - set(files))}")
print(f"{len(modules)} modules of the wheel import")
