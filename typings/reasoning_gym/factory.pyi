DATASETS: dict[str, object]
