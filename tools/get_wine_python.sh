#!/bin/bash
# Puts CPython 3.11 for Windows, which runs under Wine, into a folder: tools/get_wine_python.sh FOLDER
# Afterwards FOLDER/python runs it, like the `python` of a virtual environment. Takes about two minutes and 1 GB.
#
# Wine and a compiler come from Debian's packages. The interpreter's DLLs and the extension modules come from the wheel
# of panda3d, which ships them unchanged. The Python files of the standard library are those of a Python 3.11 that is
# here: they are the same on all systems. Only python.exe, which calls Py_Main, is compiled.
set -euo pipefail

folder=${1:?usage: tools/get_wine_python.sh FOLDER}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
ready=$folder/ready-1  # count up when this script changes what is installed
if [ -e "$ready" ]; then exit 0; fi

wheels=(
    panda3d==1.10.16 msvc-runtime==14.44.35112
    numpy==1.26.4 attrs cattrs cloudpickle typing-extensions gymnasium farama-notifications
    # Later versions of Typer, and of safetensors, bring DLLs in Rust that need more of Windows than Wine 8 has.
    'typer<0.20' click rich shellingham pygments markdown-it-py mdurl colorama pyyaml
    torch==2.4.1 safetensors==0.4.1 sympy 'mpmath<1.4' networkx jinja2 markupsafe filelock fsspec
    pytest pytest-mock pytest-timeout iniconfig packaging pluggy psutil 'hypothesis<6.130' sortedcontainers
)

if ! command -v wine > /dev/null || ! command -v x86_64-w64-mingw32-gcc > /dev/null; then
    packages="wine wine64 gcc-mingw-w64-x86-64-posix"
    # shellcheck disable=SC2086
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages; } || {
        echo "Wine and MinGW are needed, and apt-get cannot install them here. As root: apt-get install $packages" >&2
        exit 1
    }
fi

for python in python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python3.11; do
    if library=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))' 2> /dev/null); then break; fi
done
: "${library:?a Python 3.11 is needed, for the Python files of the standard library}"

rm -rf "$folder/wheels" "$folder/windows" "$folder/wine" "$folder"/ready-*
windows=$folder/windows
packages=$windows/Lib/site-packages
mkdir -p "$windows/DLLs"
cp -r "$library" "$windows/Lib"
rm -rf "$packages" "$windows"/Lib/{test,lib-dynload,config-*}
mkdir "$packages"

# Dependencies are named above, because pip would resolve them for this system.
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --platform win_amd64 --python-version 3.11 --dest "$folder/wheels" "${wheels[@]}"
for wheel in "$folder"/wheels/*.whl; do
    "${PYTHON:-python3}" -m zipfile -e "$wheel" "$packages"
done
mv "$packages"/deploy_libs/*.pyd "$packages"/deploy_libs/{libffi,libssl,libcrypto,sqlite3}*.dll "$windows/DLLs"
mv "$packages"/deploy_libs/python311.dll "$windows"
# Wine's own DLLs of these names cannot catch all exceptions of C++.
mv "$packages"/msvc_runtime-*.data/data/Scripts/*.dll "$windows"
rm -rf "$packages"/{panda3d,panda3d_tools,deploy_libs,direct,pandac}* "$packages"/torch/{include,lib/*.lib} "$folder/wheels"

cat > "$folder/python.c" << 'END'
#include <stddef.h>
__declspec(dllimport) int Py_Main(int, wchar_t **);
int wmain(int argc, wchar_t **argv) { return Py_Main(argc, argv); }
END
x86_64-w64-mingw32-gcc -municode "$folder/python.c" "$windows/python311.dll" -o "$windows/python.exe"

cat > "$folder/python" << END
#!/bin/bash
# Output goes through a pipe, because Python cannot use the handle of a file that Wine passes to it.
set -o pipefail
export WINEPREFIX="$folder/wine" WINEDEBUG=-all PYTHONPYCACHEPREFIX="Z:$folder/bytecode"
export WINEDLLOVERRIDES="mscoree,mshtml=;vcruntime140,vcruntime140_1,msvcp140,concrt140=n,b"
unset DISPLAY
wine "$windows/python.exe" "\$@" < /dev/null 2>&1 | cat
END
chmod +x "$folder/python"
"$folder/python" -c 'import sys; print("Python", sys.version.split()[0], "for", sys.platform)'
touch "$ready"
