"""An editable installation has a copy of the entry point's module, as any other has.

``import torch`` fails where an entry point cannot be loaded.  Without the copy it would fail from
the moment that the clone is moved or deleted.  All else is said in ``setup.cfg``.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel
from wheel.wheelfile import WheelFile


class EditableWithEntryPoint(editable_wheel):
    """The wheel of an editable installation, and the module in it."""

    def run(self) -> None:
        """Build it, and pack it again with the module."""
        super().run()
        (wheel,) = Path(self.dist_dir).glob("*-0.editable-*.whl")
        with TemporaryDirectory() as folder:
            with ZipFile(wheel) as packed:
                packed.extractall(folder)
            for module in self.distribution.py_modules:
                shutil.copy(f"{module}.py", folder)
            with WheelFile(wheel, "w") as packed:
                packed.write_files(folder)


# Named, since the package is this folder: it is no part of it.
setup(script_name="setup.py", cmdclass={"editable_wheel": EditableWithEntryPoint})
