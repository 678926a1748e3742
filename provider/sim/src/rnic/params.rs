//! The parameters: read from TOML, each with its source; changed by plans; turned into picoseconds.

use std::collections::BTreeMap;

use serde::Deserialize;
use starverbs_core::QpType;
use starverbs_core::qpc::{CacheConfig, ContextPlacement, Policy};
use starverbs_star::form::Form;
use thiserror::Error;

use super::events::Picos;

/// The parameters that ship with the simulator.
pub const DEFAULT_PARAMS: &str = include_str!("params.toml");

/// Why parameters or a plan cannot be used.
#[derive(Debug, Error)]
pub enum ParamError {
    /// Not TOML, an unknown name, or a value of another kind
    #[error("{0}")]
    Toml(#[from] Box<toml::de::Error>),
    /// A plan sets something that is not there
    #[error("there is no parameter `{0}`")]
    Unknown(String),
    /// A plan takes a model that is not there
    #[error("there is no model `{0}`")]
    UnknownModel(String),
    /// A value that makes no sense
    #[error("{0}")]
    Value(String),
}

/// A value and where it comes from.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sourced<T> {
    value: T,
    #[serde(rename = "source")]
    _source: String,
}

macro_rules! sections {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct $name { $($field: Sourced<$kind>,)* }
    )*};
}

sections! {
    CardSection {
        cycle_ps: u64, window_packets: u32, request_cycles: u64, descriptor_fifo_wqes: u32,
        translate_cycles: u64, mtt_entries: u32, mtt_bytes: u32, mtt_in_turn: bool,
        cq_context_cycles: u64, stack: Stack, buffer_packets: u32,
    }
    QpcSection {
        policy: PolicyName, entries: u32, client_entries: u32, ooo_cap: u16, placement: PlacementName,
        when_full: WhenFull,
        bytes: u32, acks_ask: bool, writes_clean: bool,
    }
    StarSection { security_check: bool, check_cycles: u64, form: FormName, }
    BusSection {
        read_ns: f64, write_ns: f64, header_bytes: u32, ps_per_byte: f64, wqe_bytes: u32,
        recv_wqe_bytes: u32, cqe_bytes: u32, ring_wqes: u16,
    }
    BoardSection { read_ns: f64, ps_per_byte: f64, }
    NetSection {
        link_ns: f64, switch_ns: f64, switch_ps_per_byte: f64, card_ps_per_byte: f64, header_bytes: u32,
        ack_bytes: u32, loss_ppm: u32, gbps: u32,
    }
    HostSection {
        processes: u16, clients: u16, post_ns: f64, poll_ns: f64, doorbell_ns: f64, group: u32, slot_ns: f64,
        regroup_ns: f64,
    }
    WorkloadSection {
        kind: WorkloadKind, op: RnicOp, bytes: u32, qps: u32, batch: u16, sends: u16, retry_us: u32,
        least_messages: u64, seed: u64,
    }
}

/// Cards and testbeds: what is set in place of the values of the sections.
type Models = BTreeMap<String, BTreeMap<String, Sourced<toml::Value>>>;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    card: CardSection,
    qpc: QpcSection,
    star: StarSection,
    bus: BusSection,
    board: BoardSection,
    net: NetSection,
    host: HostSection,
    workload: WorkloadSection,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum PolicyName {
    Fcfs,
    NonBlocking,
    LatencyHiding,
}

/// What a cache is worth that more connections use than it has entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum WhenFull {
    /// The least recently used goes
    Lru,
    /// Each access misses
    Misses,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum PlacementName {
    Host,
    Board,
}

/// Which packets StaR's cards send.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FormName {
    Paper,
    Packed,
}

/// What the processes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// All QPs at once, as fast as completions come
    Rate,
    /// One message at a time of each process
    Latency,
    /// Each connection's client calls, the server replies at once (StaR, simple RPC)
    Calls,
    /// The server replies to all when it has the calls of all (StaR, distributed machine learning)
    Rounds,
}

/// How connections are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Stack {
    /// RC, state on both sides, as csRNA's units carry it
    Rdma,
    /// RC, by the core's transport
    Rc,
    /// StaR, by the core's transport: the server stateless, the clients stateful
    Star,
    /// UC, by the core's transport, and clients that make calls again
    Uc,
    /// UD, likewise: a QP of each of the server's processes
    Ud,
}

/// Which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RnicOp {
    /// RDMA WRITE
    Write,
    /// RDMA READ
    Read,
    /// SEND; of calls only, as the others do not wait for it
    Send,
}

/// Bytes on a bus or wire, and the time that they take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) latency: Picos,
    header_bytes: u32,
    ps_per_byte: f64,
}

impl Lane {
    /// How long `bytes` keep it busy.
    pub(super) fn busy(&self, bytes: u32) -> Picos {
        (f64::from(bytes + self.header_bytes) * self.ps_per_byte).round() as Picos
    }
}

/// All parameters of a run, in picoseconds and bytes.
#[derive(Clone, Debug)]
pub struct Params {
    pub(super) cycle: Picos,
    pub(super) window: u32,
    pub(super) request: Picos,
    pub(super) descriptor_fifo: u32,
    pub(super) translate: Picos,
    pub(super) mtt_entries: u32,
    pub(super) mtt_bytes: u32,
    pub(super) mtt_in_turn: bool,
    pub(super) cq_context: Picos,
    pub(super) policy: Policy,
    pub(super) placement: ContextPlacement,
    pub(super) entries: u32,
    pub(super) client_entries: u32,
    pub(super) ooo_cap: u16,
    pub(super) qpc_bytes: u32,
    pub(super) bus_read: Lane,
    pub(super) bus_write: Lane,
    pub(super) board: Lane,
    pub(super) wqe_bytes: u32,
    pub(super) recv_wqe_bytes: u32,
    pub(super) cqe_bytes: u32,
    pub(super) ring_wqes: u16,
    pub(super) card_out: Lane,
    pub(super) switch: Lane,
    pub(super) ack_bytes: u32,
    pub(super) acks_ask: bool,
    /// A context that memory has as it is need not be written
    pub(super) keeps_clean: bool,
    /// The core's transport runs
    pub(super) core: bool,
    pub(super) star: bool,
    pub(super) form: Form,
    /// StaR's packets of one turn share frames
    pub(super) shares_frames: bool,
    /// The type of the core's QPs
    pub(super) qp_type: QpType,
    /// When an unanswered call is made again; 0: never, as nothing is lost for good
    pub(super) retry: Picos,
    pub(super) buffer: u32,
    pub(super) loss: f64,
    pub(super) security_check: bool,
    pub(super) check_delay: Picos,
    pub(super) group: u32,
    pub(super) slot: Picos,
    pub(super) regroup: Picos,
    pub(super) sends: u16,
    pub(super) link: Picos,
    pub(super) processes: u16,
    pub(super) clients: u16,
    pub(super) post: Picos,
    pub(super) poll: Picos,
    pub(super) doorbell: Picos,
    /// What the processes do
    pub kind: WorkloadKind,
    /// With which operation
    pub op: RnicOp,
    /// Bytes of a message
    pub bytes: u32,
    /// Connections of the server
    pub qps: u32,
    pub(super) batch: u16,
    pub(super) least_messages: u64,
    pub(super) seed: u64,
}

/// Values that a plan sets, by name: `qpc.entries`.
pub type Settings = BTreeMap<String, toml::Value>;

impl Params {
    /// Reads the parameters of `text`, with `settings` in place of its values; later ones win.
    pub fn read(text: &str, settings: &[&Settings]) -> Result<Params, ParamError> {
        Params::read_models(text, &[], settings)
    }

    /// As [`Params::read`], with what the models of those names set below the settings.
    pub fn read_models(text: &str, models: &[&str], settings: &[&Settings]) -> Result<Params, ParamError> {
        let mut tree: toml::Table = toml::from_str(text).map_err(Box::new)?;
        let known: Models = match tree.remove("models") {
            Some(known) => known.try_into().map_err(Box::new)?,
            None => Models::new(),
        };
        let mut set = Vec::new();
        for name in models {
            let model = known.get(*name).ok_or_else(|| ParamError::UnknownModel((*name).to_owned()))?;
            set.extend(model.iter().map(|(name, value)| (name, &value.value)));
        }
        for (name, value) in set.into_iter().chain(settings.iter().copied().flatten()) {
            let place = name
                .split_once('.')
                .and_then(|(section, key)| tree.get_mut(section)?.get_mut(key)?.get_mut("value"));
            *place.ok_or_else(|| ParamError::Unknown(name.clone()))? = value.clone();
        }
        let file: File = tree.try_into().map_err(Box::new)?;
        Params::convert(&file)
    }

    fn convert(file: &File) -> Result<Params, ParamError> {
        let File { card, qpc, star, bus, board, net, host, workload } = file;
        let lane = |latency: f64, header_bytes, ps_per_byte| Lane {
            latency: ns(latency),
            header_bytes,
            ps_per_byte,
        };
        // both links' rate, where it is set
        let link = |own: f64| match net.gbps.value {
            0 => own,
            gbps => 8000.0 / f64::from(gbps),
        };
        let params = Params {
            cycle: card.cycle_ps.value,
            window: card.window_packets.value,
            request: card.request_cycles.value * card.cycle_ps.value,
            descriptor_fifo: card.descriptor_fifo_wqes.value,
            translate: card.translate_cycles.value * card.cycle_ps.value,
            mtt_entries: card.mtt_entries.value,
            mtt_bytes: card.mtt_bytes.value,
            mtt_in_turn: card.mtt_in_turn.value,
            cq_context: card.cq_context_cycles.value * card.cycle_ps.value,
            policy: match qpc.policy.value {
                PolicyName::Fcfs => Policy::Fcfs,
                PolicyName::NonBlocking => Policy::NonBlocking,
                PolicyName::LatencyHiding => Policy::LatencyHiding,
            },
            placement: match qpc.placement.value {
                PlacementName::Host => ContextPlacement::Host,
                PlacementName::Board => ContextPlacement::Board,
            },
            entries: match qpc.when_full.value {
                WhenFull::Misses if workload.qps.value > qpc.entries.value => 1,
                _ => qpc.entries.value,
            },
            client_entries: qpc.client_entries.value,
            ooo_cap: qpc.ooo_cap.value,
            qpc_bytes: qpc.bytes.value,
            bus_read: lane(bus.read_ns.value, bus.header_bytes.value, bus.ps_per_byte.value),
            bus_write: lane(bus.write_ns.value, bus.header_bytes.value, bus.ps_per_byte.value),
            board: lane(board.read_ns.value, 0, board.ps_per_byte.value),
            wqe_bytes: bus.wqe_bytes.value,
            recv_wqe_bytes: bus.recv_wqe_bytes.value,
            cqe_bytes: bus.cqe_bytes.value,
            ring_wqes: bus.ring_wqes.value,
            card_out: lane(0.0, net.header_bytes.value, link(net.card_ps_per_byte.value)),
            switch: lane(net.switch_ns.value, net.header_bytes.value, link(net.switch_ps_per_byte.value)),
            link: ns(net.link_ns.value),
            ack_bytes: net.ack_bytes.value,
            acks_ask: qpc.acks_ask.value,
            keeps_clean: !qpc.writes_clean.value,
            core: card.stack.value != Stack::Rdma,
            star: card.stack.value == Stack::Star,
            form: match star.form.value {
                FormName::Paper => Form::Paper,
                FormName::Packed => Form::Packed,
            },
            shares_frames: card.stack.value == Stack::Star && matches!(star.form.value, FormName::Packed),
            qp_type: match card.stack.value {
                Stack::Uc => QpType::Uc,
                Stack::Ud => QpType::Ud,
                Stack::Rdma | Stack::Rc | Stack::Star => QpType::Rc,
            },
            retry: match card.stack.value {
                Stack::Uc | Stack::Ud => u64::from(workload.retry_us.value) * 1_000_000,
                Stack::Rdma | Stack::Rc | Stack::Star => 0,
            },
            buffer: card.buffer_packets.value,
            loss: f64::from(net.loss_ppm.value) / 1e6,
            security_check: star.security_check.value,
            check_delay: star.check_cycles.value * card.cycle_ps.value,
            group: host.group.value,
            slot: ns(host.slot_ns.value),
            regroup: ns(host.regroup_ns.value),
            sends: workload.sends.value,
            processes: host.processes.value,
            clients: host.clients.value,
            post: ns(host.post_ns.value),
            poll: ns(host.poll_ns.value),
            doorbell: ns(host.doorbell_ns.value),
            kind: workload.kind.value,
            op: workload.op.value,
            bytes: workload.bytes.value,
            qps: workload.qps.value,
            batch: workload.batch.value,
            least_messages: workload.least_messages.value,
            seed: workload.seed.value,
        };
        params.check()
    }

    /// How the server's QPC module is made.
    pub fn server_config(&self) -> CacheConfig {
        self.config(self.entries, self.qps)
    }

    /// Whether clients call and the server replies.
    pub(super) fn is_calls(&self) -> bool {
        matches!(self.kind, WorkloadKind::Calls | WorkloadKind::Rounds)
    }

    pub(super) fn config(&self, entries: u32, qps: u32) -> CacheConfig {
        let Params { policy, placement, ooo_cap, ring_wqes, .. } = *self;
        CacheConfig { policy, placement, entries, ooo_cap, qps: qps.max(1), ring_wqes }
    }

    fn check(self) -> Result<Params, ParamError> {
        let wrong = |what: &str| Err(ParamError::Value(what.to_owned()));
        let calls = self.is_calls();
        let most = u32::from(self.batch).max(if self.batch == 0 { 10 } else { 1 });
        match () {
            _ if self.cycle == 0 => wrong("card.cycle_ps is 0"),
            _ if self.window == 0 => wrong("card.window_packets is 0"),
            _ if self.request == 0 => wrong("card.request_cycles is 0"),
            _ if self.processes == 0 || self.clients == 0 => wrong("there must be processes and clients"),
            _ if !(1..=1 << 24).contains(&self.qps) => wrong("workload.qps is not 1 to 2^24"),
            _ if self.bytes > 4096 => wrong("workload.bytes: a message is one packet of at most 4096 bytes"),
            _ if most > u32::from(self.ring_wqes) => wrong("a doorbell's WQEs do not fit bus.ring_wqes"),
            _ if most > self.descriptor_fifo => {
                wrong("a doorbell's WQEs do not fit card.descriptor_fifo_wqes")
            }
            _ if calls != (self.op == RnicOp::Send) || self.core && !calls => wrong(
                "workload.op = \"send\" and workload.kind = \"calls\" or \"rounds\" go together, and StaR \
                 needs them",
            ),
            _ if !self.core && (self.loss > 0.0 || self.buffer > 0) => wrong(
                "net.loss_ppm and card.buffer_packets need another card.stack than \"rdma\": csRNA's units \
                 send nothing again",
            ),
            _ if self.core && self.policy == Policy::LatencyHiding => {
                wrong("qpc.policy: the core's transport asks for contexts by fcfs or non-blocking")
            }
            _ if self.qp_type != QpType::Rc && (self.retry == 0 || self.kind != WorkloadKind::Calls) => {
                wrong("card.stack \"uc\" and \"ud\" need workload.kind = \"calls\", and workload.retry_us")
            }
            _ if self.retry > 0 && self.qps > 4096 => {
                wrong("card.stack \"uc\" and \"ud\" name at most 4096 connections in their messages")
            }
            _ if !(0.0..0.9).contains(&self.loss) => wrong("net.loss_ppm is not 0 to 900,000"),
            _ if calls && self.qps + u32::from(self.processes) > u32::from(u16::MAX) => {
                wrong("workload.qps: calls come from at most 65,000 connections")
            }
            _ if !(1..=10).contains(&self.sends) => wrong("workload.sends is not 1 to 10"),
            _ if self.group > 0 && self.slot == 0 => wrong("host.slot_ns is 0"),
            _ => Ok(self),
        }
    }
}

fn ns(value: f64) -> Picos {
    (value.max(0.0) * 1000.0).round() as Picos
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_parameters_are_sound_and_can_be_set() {
        let set = |name: &str, value: toml::Value| Settings::from([(name.to_owned(), value)]);
        let params = Params::read(DEFAULT_PARAMS, &[&set("qpc.entries", 7.into())]).unwrap();
        assert_eq!((params.entries, params.cycle), (7, 1000));
        assert_eq!(params.bus_read.busy(256), 18_000, "a QPC takes 18 ns of PCIe");
        let read = |name, value| Params::read(DEFAULT_PARAMS, &[&set(name, value)]);
        assert!(matches!(read("qpc.entires", 7.into()), Err(ParamError::Unknown(_))));
        assert!(matches!(read("qpc.entries", "many".into()), Err(ParamError::Toml(_))));
        assert!(matches!(read("workload.bytes", 5000.into()), Err(ParamError::Value(_))));
    }
}
