"""Names a base model's weights without reading them all, so that a swapped base is noticed at resume and at export.

xxh3 of config.json and, of each safetensors file, its size, its header (names, dtypes, shapes) and `SAMPLES` pieces of 64 KiB
spread evenly over it: other weights of the same shapes differ in every piece. Costs about a second at 140 GB; a change
between the pieces stays unseen, for that the files' own checksums are there.
"""

from __future__ import annotations

import xxhash

from raytune70b.storage import Folder

SAMPLES = 32
SAMPLE = 64 << 10


def base_fingerprint(folder: Folder) -> str:
    """The fingerprint of a Hugging Face model folder's config and weights."""
    digest = xxhash.xxh3_128()
    for name, size in folder.files():
        if name == "config.json":
            digest.update(folder.read(name))
        elif name.endswith(".safetensors") and "/" not in name:
            digest.update(f"{name}\0{size}\0".encode())
            with folder.open(name) as source:
                header = source.read(8)
                digest.update(header + source.read(min(size, int.from_bytes(header, "little"))))
                for n in range(SAMPLES):
                    source.seek(max(0, size - SAMPLE) * n // (SAMPLES - 1))
                    digest.update(source.read(SAMPLE))
    return digest.hexdigest()
