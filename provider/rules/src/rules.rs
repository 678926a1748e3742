//! The rules of docs/board.md, in its order: what is tested of each.

mod commands;
mod completions;
mod contexts;
mod doorbells;
mod events;
mod garbage;
mod memory;
mod optional;
mod pci;
mod qpc;
mod registers;
mod socket;
mod star;
mod strom;
mod tables;
mod transport;
mod wire;
mod work;

use crate::bench::Bench;
use crate::fault::Tested;

type Test = fn(&mut Bench) -> Tested;

/// A rule.
pub struct BoardRule {
    /// Its number in docs/board.md
    pub number: u32,
    /// Its sentence in short, or what of it is tested
    pub says: &'static str,
    /// Tests it; or why it is not testable from outside
    pub(crate) test: Result<Test, &'static str>,
    /// It needs registers, maps or more of what a driver alone has
    pub(crate) of_function: bool,
}

impl BoardRule {
    /// Whether the runner tests anything of it.
    pub fn is_tested(&self) -> bool {
        self.test.is_ok()
    }
}

const fn rule(number: u32, says: &'static str, test: Test) -> BoardRule {
    BoardRule { number, says, test: Ok(test), of_function: false }
}

const fn function(number: u32, says: &'static str, test: Test) -> BoardRule {
    BoardRule { number, says, test: Ok(test), of_function: true }
}

const fn inside(number: u32, says: &'static str, why: &'static str) -> BoardRule {
    BoardRule { number, says, test: Err(why), of_function: false }
}

/// All rules, in order.
pub const RULES: &[BoardRule] = &[
    function(1, "magic, version and sizes are the headers'", registers::numbers),
    inside(2, "no two numbers are the same", "a matter of the headers, which a test of theirs holds"),
    function(3, "registers are written as wholes, else EINVAL and no change", registers::wholes),
    function(4, "enabling checks the queues; enabled, their registers are EBUSY", registers::enabling),
    function(5, "CTRL_RESET, a reset of the function and the client's end are the same", registers::resets),
    function(6, "enabling zeroes the doorbell page, making a queue its cell", registers::zero_cells),
    inside(7, "a driver bounds its waits", "a rule for drivers"),
    rule(8, "what the board does not take is EOPNOTSUPP, as REG_CAPS says", commands::capabilities),
    function(9, "whatever a client writes, the board goes on, and others see nothing", garbage::garbage),
    function(10, "the answer comes before the status; a failed command's body stays", commands::answers),
    function(11, "a count beyond the queue is EINVAL, before enabling ENXIO", commands::counts),
    rule(12, "commands are in order, and done when their status says so", commands::order),
    rule(13, "an object that others need is EBUSY, and stays", commands::busy),
    rule(14, "a function names its own objects alone", commands::own_objects),
    rule(15, "one write of a cell has all of a batch fetched", doorbells::batch),
    inside(16, "a driver stores the cell behind the WQEs", "a rule for drivers"),
    rule(17, "an index that no queue can have is counted and is none", doorbells::wild),
    rule(18, "a cell of no queue, and a value that was there, are no doorbells", doorbells::none),
    function(19, "queues are aligned, mapped, writable and of a size that fits", work::sizes),
    rule(20, "a send WQE is fetched once", work::fetched_once),
    rule(21, "a WQE that contradicts itself completes with LOC_QP_OP_ERR", work::contradictions),
    rule(22, "send_released says which slots may be written again", work::released),
    rule(23, "receives need no doorbell; recv_starved says when one was missed", work::receives),
    rule(24, "lkey, bounds, rights and domain are checked, else LOC_PROT_ERR and ERR", work::keys),
    rule(25, "ERR flushes what is and what comes; RESET forgets it", work::flushes),
    rule(26, "RC, UC and UD carry messages and one-sided operations", transport::operations),
    rule(27, "on the wire it is RoCEv2", wire::frames),
    rule(28, "a CQE's last word is stored last, its phase changes with each round", completions::phase),
    rule(29, "one CQE for each signaled or failed send and each receive", completions::one_each),
    rule(30, "a full CQ fails once, or loses what comes if it was made so", completions::overrun),
    rule(31, "an armed CQ raises one event", completions::armed),
    function(32, "events are numbered, the number stored last; others wait for room", events::numbered),
    rule(33, "the vector is signalled after events were written", events::signal),
    rule(34, "asynchronous events name the object", events::names),
    function(35, "maps are checked, and what lies in none is a miss", memory::maps),
    function(36, "unmapped memory is not touched, with queues in it or without", memory::unmapped),
    rule(37, "data comes before its CQE, and a write's last byte last", memory::order),
    rule(38, "atomics are atomic", memory::atomics),
    function(39, "what is no message ends its connection alone; a function has one client", socket::messages),
    function(40, "a map's file is sealed, or the client's own memory", socket::files),
    inside(41, "the library gives the board its memory if it is the same user's", "a rule for the library"),
    inside(42, "the library believes nothing that the board says", "a rule for the library"),
    function(43, "a guest finds BARs, capabilities, vectors; what is only read stays", pci::config_space),
    function(44, "a vector is signalled by the eventfd that was given for it", pci::vectors),
    function(45, "a range is unmapped with all in it; a map without a descriptor is none", pci::unmaps),
    function(46, "a function that masters no bus reaches nothing and interrupts nobody", pci::bus_master),
    function(47, "contexts have pages, events and vectors of their own; one alone opens", contexts::open),
    function(48, "contexts name their own objects alone; their keys open nothing to others", contexts::apart),
    function(49, "closing a context ends all in it, and touches nothing of it any more", contexts::close),
    rule(50, "a CQ moves to another ring, with what it is armed for", optional::resized),
    rule(51, "events are moderated by count and time", optional::moderated),
    rule(52, "a null region reads as zeroes and drops what is written", optional::null),
    rule(53, "datagrams to a group reach its members", optional::groups),
    rule(54, "XRC messages reach the SRQ of the domain that they name", optional::xrc),
    rule(55, "management datagrams reach whose service or ID they name", optional::mads),
    function(56, "a region of pages has a table that fits, and is told as it was made", tables::regions),
    function(57, "its bytes are the pages' in the table's order; a page of no map is a miss", tables::access),
    function(58, "few QP contexts on chip make the board slower, and are counted", qpc::contexts),
    function(59, "a message of csRNA's form begins where the queue ends", doorbells::messages),
    function(60, "contexts that are not on chip are in the host's memory, if it gave some", qpc::in_host),
    rule(61, "ends of StaR settle, and carry what RC carries", star::ends),
    rule(62, "a program says what its end is to be while it runs", star::changes),
    inside(63, "what a stateless end costs and may not do", "a matter of the board's memory"),
    inside(64, "commands that wait for peers hold up their function alone", "it takes a peer that is silent"),
    inside(65, "packets of StaR reach their own function's memory alone", "it takes packets that are forged"),
    rule(66, "queue pairs of StRoM's dialect carry RPCs, whose answers complete to nobody", strom::answers),
    rule(67, "kernels are loaded, replaced and unloaded", strom::kernels),
    rule(68, "RPCs that are left to the program take receives", strom::left_to_program),
    rule(69, "a kernel reaches what the peer may", strom::rights),
    inside(70, "a context has its own kernels, and a share of the board's", "a matter of the board's memory"),
];
