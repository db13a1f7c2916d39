"""Datasets in the parquet and jsonl format of verl, loaders, converters and the tiny tasks; imports no torch."""
