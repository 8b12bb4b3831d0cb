"""Options of commands whose modules import torch: ``--help`` must not."""
