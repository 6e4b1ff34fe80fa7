"""The stages of a run, one module each: the driver's part, which hands the work to actors and records what came back."""
