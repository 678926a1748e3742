//! The objects a verbs program holds, and the progress engine
