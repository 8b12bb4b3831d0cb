"""Sets groups up: processes find each other, then make boards, process groups and backends."""
