"""Parts of jobs/train.py and jobs/train_draft.py: configurations, data, and the record."""
