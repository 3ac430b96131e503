"""What a result depends on besides its config, as commands write it into their folders."""

from refusion_lit.reports.environment import environment, write_environment

__all__ = ["environment", "write_environment"]
