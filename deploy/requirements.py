"""Print a project's dependencies, to install them before its sources are copied.

requirements.py pyproject.toml [EXTRAS]    # EXTRAS: the names of optional dependencies to include: gpu,s3
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
