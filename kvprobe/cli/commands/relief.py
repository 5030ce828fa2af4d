"""``kvprobe relief``: what does each lever on the KV cache cost, and leave?"""

from kvprobe.cli.experiment import command_of
from kvprobe.experiments.relief import Relief

command = command_of(Relief)
