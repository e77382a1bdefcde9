"""Prints a project's dependencies, so that they can be installed before its sources are there.

requirements.py pyproject.toml [EXTRAS]    # with those of its extras of these names: gpu,s3
"""

import sys
import tomllib

path, *extras = sys.argv[1:]
with open(path, "rb") as file:
    project = tomllib.load(file)["project"]
wanted = [name for name in ",".join(extras).split(",") if name]
if unknown := set(wanted) - set(project["optional-dependencies"]):
    sys.exit(f"{path} has no extra named {', '.join(sorted(unknown))}")
print(
    "\n".join(
        project["dependencies"] + [r for name in wanted for r in project["optional-dependencies"][name]]
    )
)
