//! Queue pair 1: management datagrams, and for whom of the board's clients they are.
//!
//! A client gets a block of communication IDs, by whose upper bits a message names its connections, and holds
//! services among all processes of the host. What nobody of the board's clients is asked by is answered here,
//! as by a host without connections.

use std::collections::{BTreeMap, VecDeque};

use starverbs_cm::wire::{Destination, sender_id};
use starverbs_cm::{Cm, CmConfig, CmPath, ListenAt, OutboundMad, Scope};
use starverbs_core::{Av, Gid, MAD_LEN, Port, ReceivedMad};
use starverbs_queues::board::{SCOPE_ALL, SCOPE_IPV4, SCOPE_IPV6, SCOPE_ONE, SERVICE_SHARED, Service};

use crate::broken;
use crate::dma::Errno;
use crate::function::CommonCard;
use crate::record::HostRequest;

/// Datagrams that wait for a client; more are lost, and sent again.
const WAITING: usize = 256;
/// Services of a client at most.
const SERVICES: usize = 256;
/// Of a communication ID, the bits below its owner's block.
const ID_SHIFT: u32 = 20;

/// A context, as the card's objects name theirs.
type Client = u64;

/// Queue pair 1 of the board.
pub(crate) struct BoardQp1 {
    /// By the block of its IDs
    owners: BTreeMap<u32, Client>,
    /// Blocks that no client has any more
    spare: Vec<u32>,
    /// What came and was not taken
    queues: BTreeMap<Client, VecDeque<ReceivedMad>>,
    services: Vec<(ListenAt, Client)>,
    /// Answers what is for nobody
    nobody: Cm,
}

impl BoardQp1 {
    pub(crate) fn new(guid: u64, seed: u64) -> BoardQp1 {
        let nobody = Cm::new(CmConfig { guid, owner: 0, seed });
        let (owners, queues) = (BTreeMap::new(), BTreeMap::new());
        BoardQp1 { owners, spare: Vec::new(), queues, services: Vec::new(), nobody }
    }

    /// The clients that a datagram is for.
    fn clients(&self, to: Gid, mad: &[u8]) -> Vec<Client> {
        match Destination::of(mad) {
            Some(Destination::Id(id)) => self.owners.get(&(id >> ID_SHIFT)).copied().into_iter().collect(),
            Some(Destination::Service(service)) => {
                let holders = Scope::around(to).map(|scope| ListenAt { service, scope });
                let found = |at: &ListenAt| self.services.iter().find(|(held, _)| held == at);
                holders.iter().find_map(found).map(|(_, client)| *client).into_iter().collect()
            }
            /* who gave up before it knew an ID of ours names its own: whoever has that request knows it */
            None => self.queues.keys().copied().collect(),
        }
    }
}

/// EINVAL: a scope that there is not, or an address without it.
fn place(service: &Service) -> Result<ListenAt, Errno> {
    let scope = match service.scope {
        SCOPE_ONE => Scope::One(Gid(service.gid)),
        SCOPE_IPV4 => Scope::AnyV4,
        SCOPE_IPV6 => Scope::AnyV6,
        SCOPE_ALL => Scope::Any,
        _ => return Err(libc::EINVAL),
    };
    Ok(ListenAt { service: service.id, scope })
}

impl CommonCard {
    /// A client has queue pair 1 from now on: the upper bits of its communication IDs. EAGAIN: there are none
    /// left.
    pub(crate) fn open_mads(&mut self, client: Client) -> Result<u32, Errno> {
        if let Some((block, _)) = self.mads.owners.iter().find(|(_, owner)| **owner == client) {
            return Ok(*block);
        }
        let block = match self.mads.spare.pop() {
            Some(block) => block,
            None => self.tap.host(HostRequest::Block, || self.rx.claim_block())?,
        };
        self.mads.owners.insert(block, client);
        self.mads.queues.insert(client, VecDeque::new());
        Ok(block)
    }

    /// A client is gone, and with it what it held.
    pub(crate) fn close_mads(&mut self, client: Client) {
        let CommonCard { mads, rx, .. } = self;
        mads.queues.remove(&client);
        let mine = |(_, owner): (&u32, &Client)| *owner == client;
        let blocks: Vec<u32> =
            mads.owners.iter().filter(|each| mine(*each)).map(|(block, _)| *block).collect();
        for block in blocks {
            mads.owners.remove(&block);
            mads.spare.push(block);
        }
        mads.services.retain(|(at, holder)| {
            if *holder == client {
                rx.release_service(*at);
            }
            *holder != client
        });
    }

    /// The oldest datagram that waits for a client.
    pub(crate) fn take_mad(&mut self, client: Client) -> Option<ReceivedMad> {
        self.mads.queues.get_mut(&client)?.pop_front()
    }

    /// Sends a datagram to queue pair 1 at an address. EINVAL: it is no message of a connection manager;
    /// EPERM: it bears a communication ID that is not the client's.
    pub(crate) fn send_mad(&mut self, client: Client, to: &Av, mad: &[u8; MAD_LEN]) -> Result<(), Errno> {
        let id = sender_id(mad).ok_or(libc::EINVAL)?;
        if id != 0 && self.mads.owners.get(&(id >> ID_SHIFT)) != Some(&client) {
            return Err(libc::EPERM);
        }
        self.emit_mad(to, mad);
        Ok(())
    }

    fn emit_mad(&mut self, to: &Av, mad: &[u8; MAD_LEN]) {
        if !self.env.can_send() {
            self.env.flush(self.now);
        }
        self.nic.send_mad(&mut self.env, to, mad);
        self.env.flush(self.now);
    }

    /// Requests for a service come to a client. EADDRINUSE, EADDRNOTAVAIL: somebody holds it, or a part of
    /// it; ENOMEM: it holds as many as it may; EINVAL: it has not opened queue pair 1.
    pub(crate) fn claim_service(&mut self, client: Client, service: &Service) -> Result<(), Errno> {
        let at = place(service)?;
        let mads = &mut self.mads;
        if !mads.queues.contains_key(&client) {
            return Err(libc::EINVAL);
        }
        let held = mads.services.iter().filter(|(_, holder)| *holder == client).count();
        if held >= SERVICES {
            return Err(libc::ENOMEM);
        }
        /* within the board it may be shared by its one holder alone */
        if mads.services.iter().any(|(other, holder)| *other == at && *holder != client) {
            return Err(libc::EADDRINUSE);
        }
        let shared = service.flags & SERVICE_SHARED != 0;
        let claim = || self.rx.claim_service(at, shared).map(|()| 0);
        self.tap.host(HostRequest::Service, claim)?;
        mads.services.push((at, client));
        Ok(())
    }

    /// It does not any more. EINVAL: it does not hold it.
    pub(crate) fn release_service(&mut self, client: Client, service: &Service) -> Result<(), Errno> {
        let held = (place(service)?, client);
        let found = self.mads.services.iter().position(|each| *each == held).ok_or(libc::EINVAL)?;
        self.mads.services.swap_remove(found);
        self.rx.release_service(held.0);
        Ok(())
    }

    /// Gives out what came; says which clients have something where they had nothing.
    pub(crate) fn sort_mads(&mut self) -> Vec<Client> {
        let mut told = Vec::new();
        if broken::rule(55) {
            return told;
        }
        while let Some(came) = self.nic.poll_mad() {
            let clients = self.mads.clients(came.meta.dst, &came.bytes);
            if clients.is_empty() {
                self.answer_for_nobody(&came);
            }
            for client in clients {
                let Some(queue) = self.mads.queues.get_mut(&client) else { continue };
                if queue.is_empty() {
                    told.push(client);
                }
                if queue.len() < WAITING {
                    queue.push_back(came);
                }
            }
        }
        told
    }

    fn answer_for_nobody(&mut self, came: &ReceivedMad) {
        let ReceivedMad { meta, bytes } = came;
        let traffic_class = meta.traffic_class & !3;
        let path = CmPath { local: meta.dst, remote: meta.src, traffic_class, hop_limit: 0 };
        self.mads.nobody.handle_mad(self.now, path, bytes);
        while let Some(OutboundMad { path, mad }) = self.mads.nobody.poll_send() {
            let source = self.addrs.iter().position(|addr| addr.gid == path.local);
            let Some(sgid_index) = source.and_then(|at| u8::try_from(at).ok()) else { continue };
            let (dgid, sgid, traffic_class) = (path.remote, path.local, path.traffic_class);
            let to = Av { dgid, sgid, sgid_index, traffic_class, hop_limit: path.hop_limit, ..Av::default() };
            self.emit_mad(&to, mad.bytes());
        }
    }
}
