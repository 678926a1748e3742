//! Connections between engines, without an operating system.

mod common;

mod loss;
mod rules;
