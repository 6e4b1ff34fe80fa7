"""draftline: trains a DSpark draft for a target model, proves it, and serves both."""

__version__ = "0.1.0"
