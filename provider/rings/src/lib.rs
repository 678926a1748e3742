//! Queues between a program and its card: SQ, RQ, CQ, doorbells
