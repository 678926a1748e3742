//! A program under test, on the host or in a guest.

use std::time::{Duration, Instant};

use starverbs_conformance::process::Process;

use crate::guest::{Found, Job};

/// A started program, wherever it runs. Dropping it kills it.
pub enum Program {
    /// In the namespace, and where a client finds it.
    Here(Process, Found),
    /// In the guest.
    There(Job),
}

impl Program {
    /// Whether it has ended, and if so whether well.
    pub fn ended(&mut self) -> Option<bool> {
        match self {
            Program::Here(process, _) => process.ended().map(|status| status.success()),
            Program::There(job) => job.ended().map(|status| status == 0),
        }
    }

    /// Waits until it ends or `deadline` comes.
    pub fn wait_until(&mut self, deadline: Instant) -> Option<bool> {
        self.wait_for(deadline, Program::ended)
    }

    /// Waits until it listens or ends; false if `deadline` came before.
    pub fn await_listening(&mut self, deadline: Instant) -> bool {
        let ready = |program: &mut Program| {
            let listens = match program {
                Program::Here(process, Found::Tcp(port)) => process.listens(*port),
                Program::Here(process, Found::Service(port)) => process.serves(*port),
                Program::There(job) => job.listens(),
            };
            (listens || program.ended().is_some()).then_some(true)
        };
        self.wait_for(deadline, ready).is_some()
    }

    fn wait_for(&mut self, deadline: Instant, ready: impl Fn(&mut Program) -> Option<bool>) -> Option<bool> {
        loop {
            let result = ready(self);
            if result.is_some() || Instant::now() >= deadline {
                return result;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// All it wrote so far, errors last.
    pub fn output(&self) -> String {
        match self {
            Program::Here(process, _) => process.output(),
            Program::There(job) => job.output(),
        }
    }

    /// Ends it.
    pub fn kill(&mut self) {
        match self {
            Program::Here(process, _) => process.kill(),
            Program::There(job) => job.kill(),
        }
    }
}
