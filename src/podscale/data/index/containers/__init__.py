"""The kinds of data sets: image folders, tars, TFRecords, parquet files, and raw arrays."""
