import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHILD = """
import signal, time
from oformer.processes import stop_with_parent

def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    raise SystemExit

signal.signal(signal.SIGTERM, heard)
stop_with_parent()
print("ready", flush=True)
time.sleep(3600)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_child_hears_sigterm_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    out, _ = parent.communicate()  # ends when the child has ended, too
    assert out == "SIGTERM\n"
