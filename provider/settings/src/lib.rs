//! STARVERBS_* variables and the TOML file with the same keys
