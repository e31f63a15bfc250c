"""The step loop and one file per trainer."""
