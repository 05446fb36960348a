"""Writes files of a wheel into a folder. Only the parts of the wheel that have them are downloaded, as pip does to read
the metadata of one (--use-feature=fast-deps).

Usage: WHEEL FOLDER FILE..., with WHEEL as NAME==VERSION
"""

import os
import shutil
import sys
import zipfile

from pip._internal.commands import create_command
from pip._internal.network.lazy_wheel import LazyZipOverHTTP
from pip._vendor.packaging.specifiers import SpecifierSet

wheel, folder, files = sys.argv[1], sys.argv[2], sys.argv[3:]
name, _, version = wheel.partition("==")
download = create_command("download")
with download.main_context():
    options, _ = download.parse_args(["--only-binary=:all:"])
    session = download.get_default_session(options)
    finder = download._build_package_finder(options, session, ignore_requires_python=True)
    best = finder.find_best_candidate(name, SpecifierSet("==" + version)).best_candidate
    if best is None:
        sys.exit(f"there is no {wheel} for this machine")
    archive = zipfile.ZipFile(LazyZipOverHTTP(best.link.url_without_fragment, session))
    os.makedirs(folder)
    for file in files:
        with archive.open(file) as content, open(os.path.join(folder, os.path.basename(file)), "wb") as copy:
            shutil.copyfileobj(content, copy)
