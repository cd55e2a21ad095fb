"""The command line: `cadence plan`, `infer`, `doctor` and `explain`, one module each."""
