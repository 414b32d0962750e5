"""What was measured: records, the sample table, the store."""
