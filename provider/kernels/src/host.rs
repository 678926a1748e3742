//! Memory for tests of kernels: a region, and what executes their commands.

use std::collections::BTreeSet;

use starverbs_core::strom::{Code, Input, Kernel, KernelMemory, KernelRun, KernelSend, Poll, RegionRange};

/// No request of any kernel takes more.
const MOST_STEPS: usize = 1 << 14;

/// Something done to memory.
type Change = Box<dyn FnMut(&mut [u8])>;

/// One region.
pub(crate) struct TestHost {
    base: u64,
    bytes: Vec<u8>,
    /// Called with all of it before each read
    pub(crate) before_read: Option<Change>,
    /// What queue pairs were to send
    pub(crate) sent: Vec<(u32, RegionRange, Vec<u8>)>,
    full: bool,
    /// Calls are the card's own program's, and not a peer's
    pub(crate) own: bool,
    /// A step that does not end a request must ask for something, and keys are written down
    pub(crate) strict: bool,
    /// Keys that commands and answers have named
    pub(crate) keys: BTreeSet<u32>,
    run: KernelRun,
}

impl TestHost {
    /// Key of the region.
    pub(crate) const KEY: u32 = 0x77;

    pub(crate) fn new(base: u64, len: usize) -> Self {
        TestHost {
            base,
            bytes: vec![0; len],
            before_read: None,
            sent: vec![],
            full: false,
            own: false,
            strict: false,
            keys: BTreeSet::new(),
            run: KernelRun::new(1).expect("memory"),
        }
    }

    fn range(&self, place: RegionRange) -> Option<core::ops::Range<usize>> {
        let from = usize::try_from(place.va.checked_sub(self.base)?).ok()?;
        let to = from.checked_add(place.len as usize)?;
        (place.key == TestHost::KEY && to <= self.bytes.len()).then_some(from..to)
    }

    fn note_key(&mut self, key: u32) {
        if self.strict {
            self.keys.insert(key);
        }
    }

    pub(crate) fn put(&mut self, at: u64, data: &[u8]) {
        let from = (at - self.base) as usize;
        self.bytes[from..from + data.len()].copy_from_slice(data);
    }

    pub(crate) fn get(&self, at: u64, len: usize) -> &[u8] {
        &self.bytes[(at - self.base) as usize..][..len]
    }

    /// An RPC: how it ends, and its answer.
    pub(crate) fn call(&mut self, kernel: &mut dyn Kernel, params: &[u8]) -> (Code, Vec<u8>) {
        self.run_kernel(kernel, params, Input::Params, true)
    }

    /// A packet of an RPC WRITE.
    pub(crate) fn feed(&mut self, kernel: &mut dyn Kernel, data: &[u8], first: bool, last: bool) -> Code {
        self.run_kernel(kernel, data, Input::Data { first, last }, first).0
    }

    fn run_kernel(
        &mut self,
        kernel: &mut dyn Kernel,
        data: &[u8],
        input: Input,
        begins: bool,
    ) -> (Code, Vec<u8>) {
        let own = || KernelRun::new(0).expect("memory");
        let peers = core::mem::take(&mut self.run);
        let (mut run, peers) = if self.own { (own(), Some(peers)) } else { (peers, None) };
        run.load(data, begins);
        let mut outcome = kernel.start(&mut run, input).err();
        let mut steps = 0;
        while outcome.is_none() {
            steps += 1;
            assert!(steps <= MOST_STEPS, "a request that does not end");
            outcome = run.execute(self).err();
            if outcome.is_some() || !run.is_drained() {
                continue;
            }
            let Poll::Ready(code) = kernel.step(&mut run) else {
                assert!(!self.strict || !run.is_drained(), "a step that asks for nothing, and does not end");
                continue;
            };
            outcome = run.execute(self).err();
            while outcome.is_none() && !run.is_drained() {
                outcome = run.execute(self).err();
            }
            outcome = outcome.or(Some(code));
        }
        let code = outcome.unwrap_or_default();
        if let Some(place) = run.answered_from() {
            self.note_key(place.key);
        }
        let answer = match (code, run.answered_from()) {
            (Code::Ok, Some(place)) => self.range(place).map_or(vec![], |range| self.bytes[range].to_vec()),
            (Code::Ok, None) => run.reply_bytes().to_vec(),
            _ => vec![],
        };
        self.run = peers.unwrap_or(run);
        (code, answer)
    }
}

impl KernelMemory for TestHost {
    fn read(&mut self, from: RegionRange, to: &mut [u8]) -> bool {
        self.note_key(from.key);
        if let Some(change) = &mut self.before_read {
            change(&mut self.bytes);
        }
        self.range(from).map(|range| to.copy_from_slice(&self.bytes[range])).is_some()
    }

    fn write(&mut self, to: RegionRange, data: &[u8]) -> bool {
        self.note_key(to.key);
        self.range(to).map(|range| self.bytes[range].copy_from_slice(data)).is_some()
    }

    /// Room comes with every second try.
    fn send(&mut self, qpn: u32, to: RegionRange, data: &[u8]) -> KernelSend {
        self.full = !self.full;
        if self.full {
            return KernelSend::Full;
        }
        self.note_key(to.key);
        self.sent.push((qpn, to, data.to_vec()));
        KernelSend::Posted
    }
}
