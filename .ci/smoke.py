"""The installed wheel, tried in a folder that has nothing of the checkout: metadata, types, the README's code for a
CPU."""

import importlib.metadata
import re
from pathlib import Path

import cuteforge

metadata = importlib.metadata.metadata("cuteforge")
readme = metadata.get_payload()
package = Path(cuteforge.__file__).parent

assert metadata["Version"] == cuteforge.__version__
assert "site-packages" in package.parts, package
assert (package / "py.typed").exists()
assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", readme), "a link to a file that an index page does not have"

blocks = re.findall(r"<!-- runs: cpu -->\n```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
assert blocks
for block in blocks:
    exec(block, {"__name__": "__readme__"})
print(f"cuteforge {cuteforge.__version__} from {package}: {len(blocks)} block(s) of the README ran")
