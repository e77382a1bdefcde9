"""A package that is run with -m. It has relative imports, and its configuration is a file inside the
package."""

import json
from importlib.resources import files

from .module.compute import compute_world_size

if __name__ == "__main__":
    compute_world_size(json.loads(files(__package__).joinpath("defaults.json").read_text()))
