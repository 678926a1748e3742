//! A Valkey server over RDMA or over TCP, under a client of our own (programs/valkey.c): 50 connections, each
//! with one request of 64 B under way.
//!
//! Owns the command lines. The server comes from a source folder that VALKEY names, built there by
//! `make BUILD_RDMA=module`. It must not know the card.

use std::path::PathBuf;
use std::process::Command;

use crate::case::Setup;
use crate::child::{self, Ready};
use crate::error::{BenchError, Result};
use crate::perftest::{Link, library_dir, on_card, require_same_host, same_host};

const CONNECTIONS: &str = "50";

/// Requests of a kind ("SET", "GET") over a link of the card; `None`: over TCP. Millions a second.
///
/// # Errors
/// As [`crate::case::Case::run`].
pub(crate) fn run(setup: &Setup, request: &str, link: Option<Link>, iters: u64) -> Result<f64> {
    let built = built()?;
    let lib = library_dir(&setup.dist)?;
    let program = child::compiled("valkey", &lib)?;
    let port = child::free_tcp_port()?;
    let on_link = |path: &PathBuf| {
        let mut side = Command::new(path);
        on_card(&mut side, &lib);
        if link.is_some_and(|link| link != Link::Udp) {
            same_host(&mut side);
        }
        side
    };
    let mut server = on_link(&built.join("valkey-server"));
    server.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    if link.is_some() {
        server.arg("--loadmodule").arg(built.join("valkey-rdma.so"));
        server.args(["bind=127.0.0.1", &format!("port={port}")]);
    }
    let mut client = on_link(&program);
    let over = if link.is_some() { "rdma" } else { "tcp" };
    client.args([over, request, &port.to_string(), CONNECTIONS, &iters.to_string(), "stop"]);
    let output = child::run_pair(server, client, Ready::Tcp(port), setup.cpus, setup.limit);
    /* the program is ours alone; that it stays behind harms nobody */
    let _ = std::fs::remove_file(&program);
    let output = output?;
    if link.is_some_and(|link| link != Link::Udp) {
        require_same_host("valkey", &output)?;
    }
    let rate = output.stdout.trim().parse();
    rate.map_err(|_| BenchError::Parse { what: "valkey".into(), tail: child::tail_of(&output.stdout) })
}

/// The folder with the server and its module.
fn built() -> Result<PathBuf> {
    let folder = std::env::var_os("VALKEY").map(|folder| PathBuf::from(folder).join("src"));
    folder.filter(|folder| folder.join("valkey-rdma.so").is_file()).ok_or_else(|| BenchError::Missing {
        tool: "Valkey with RDMA (VALKEY=FOLDER)".to_owned(),
        package: "none: built by make BUILD_RDMA=module",
    })
}
