"""Settings of temperature, top_k, top_p and min_p, alone and together."""

FILTERS = [
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 300},
    {"top_k": 4999},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 2000, "top_p": 0.6},
    {"top_k": 500, "min_p": 0.3},
]
