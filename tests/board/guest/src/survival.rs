//! Tests of the kernel module: whether it survives, and what it leaves behind, whatever happens to it, its
//! board and its programs. Most are functions of survival.sh, which runs in the guest.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::report::Report;
use crate::world::{Boot, Parts, World};

const SCRIPT: &str = include_str!("../survival.sh");
/// How long a test may take: emulation is slow.
const LIMIT: Duration = Duration::from_secs(900);
/// rdma-core's tests that are run, by words in their names. docs/board-guest.md says why not the others.
const TESTS: &str = "test_addr test_atomic test_cq test_device test_fork test_mr test_parent_domain test_pd \
                     test_qpex test_relaxed_ordering test_shared_pd";
/// Opens that are killed.
const OPENS: u32 = 1000;
/// How often a board is stopped, and for how long: shorter than the module and QEMU wait for an answer.
const STOPS: u32 = 5;
const STOPPED: Duration = Duration::from_secs(2);
/// The kernel checks what is allocated and freed: red zones, poison, double frees, who uses what is freed.
const CHECKED: &str = "slub_debug=FZPU page_poison=1";
/// QEMU holds the CPU of a guest that reads a register of a silent board, 5 s each time, which is no stall of
/// the kernel.
const HELD: &str = "rcupdate.rcu_cpu_stall_timeout=300 nowatchdog";
/// Of two QP contexts that talk to each other one is elsewhere.
const ONE_ON_CHIP: &str = "1,miss=1us,policy=non-blocking";
const IOMMU: &str = "intel_iommu=on iommu.strict=1";

/// A test: its title, and what it does.
struct ModuleTest {
    title: &'static str,
    act: Act,
}

enum Act {
    /// A function of survival.sh
    Script(&'static str),
    /// The board's process is killed under load; last of its guest, whose boards can lie: QEMU itself does
    /// not survive it (see `liar`)
    KillBoard,
    /// It is stopped for a while
    StopBoard,
    /// It is stopped, and does not go on; last of its guest
    SilenceBoard,
    /// The board lies to the kernel for a while
    Lie,
    /// The guest reboots under load
    Reboot,
}

/// A boot, and the tests there.
struct Round {
    boot: Boot,
    tests: Vec<ModuleTest>,
}

fn script(title: &'static str, name: &'static str) -> ModuleTest {
    ModuleTest { title, act: Act::Script(name) }
}

fn rounds() -> Vec<Round> {
    let plain = vec![
        script("the module is loaded and unloaded 100 times", "loads"),
        script("it is unloaded under load", "unload_under_load"),
        script("1,000 opens, killed", "opens"),
        script("FLR under load", "flr"),
        script("the driver is unbound under load, the device removed", "unbind"),
        script("a hostile process", "attacks"),
        script("a board on its own reaches all memory, without an IOMMU", "wild"),
        ModuleTest { title: "the guest reboots under load", act: Act::Reboot },
    ];
    let iommu = vec![
        script("intel-iommu: a ping-pong", "traffic"),
        script("intel-iommu: a board on its own reaches nothing", "wild"),
        script("intel-iommu: a hostile process", "attacks"),
        script("intel-iommu: opens, killed", "opens"),
        script("intel-iommu: rdma-core's tests of queue pairs", "pyverbs_qp"),
        script("intel-iommu: FLR under load", "flr"),
        script("intel-iommu: the driver is unbound under load, the device removed", "unbind"),
    ];
    let programs = vec![
        script("programs of rdma_cm", "cm"),
        script("multicast", "multicast"),
        script("the board's numbered rules, by its device", "rules"),
        script("rdma-core's own tests", "pyverbs"),
        ModuleTest { title: "the board is stopped under load, and goes on", act: Act::StopBoard },
        ModuleTest { title: "the board is stopped under load, and does not go on", act: Act::SilenceBoard },
    ];
    let contexts = vec![
        script("the udev rule", "udev"),
        script("QP contexts in the host's memory, with room for one on chip", "qpc"),
    ];
    let lies = vec![
        ModuleTest { title: "a board that lies to the kernel", act: Act::Lie },
        ModuleTest { title: "the board's process is killed under load", act: Act::KillBoard },
    ];
    vec![
        Round { boot: Boot { line: CHECKED, may_lie: true, ..Boot::default() }, tests: lies },
        Round { boot: Boot { line: CHECKED, qpc_cache: ONE_ON_CHIP, ..Boot::default() }, tests: contexts },
        Round { boot: Boot { line: HELD, ..Boot::default() }, tests: programs },
        Round { boot: Boot { line: CHECKED, reboots: true, ..Boot::default() }, tests: plain },
        Round {
            boot: Boot {
                line: IOMMU,
                devices: &["-device", "intel-iommu,caching-mode=on"],
                ..Boot::default()
            },
            tests: iommu,
        },
    ]
}

/// Runs those whose title is wanted, each round in guests of its own, and in new ones behind a failure.
pub(crate) fn run(
    parts: &Parts,
    report: &mut Report,
    seed: u64,
    wanted: impl Fn(&str) -> bool,
) -> Result<(), String> {
    for Round { boot, tests } in rounds() {
        let tests: Vec<_> = tests.into_iter().filter(|test| wanted(test.title)).collect();
        if tests.is_empty() {
            continue;
        }
        let mut guest = None;
        for test in tests {
            let mut world = match guest.take() {
                Some(world) => world,
                None => report.boot(parts, &boot)?,
            };
            let verdict = test.run(&mut world, &boot, seed);
            /* what a test leaves that failed is not the next one's fault */
            guest = verdict.is_ok().then_some(world);
            report.add_test(test.title, verdict);
        }
    }
    Ok(())
}

impl ModuleTest {
    fn run(&self, world: &mut World, boot: &Boot, seed: u64) -> Result<String, String> {
        let expect = if boot.devices.is_empty() { "reached" } else { "refused 14" };
        let test = |world: &mut World, name: &str| {
            let [first, second] = [0, 1].map(|number| world.on_board(number).join(" "));
            let here = Path::new(env!("CARGO_MANIFEST_DIR"));
            let program = std::env::current_exe().map_err(|e| e.to_string())?;
            let head = format!(
                "LIB='{}' PYVERBS='{}' TESTS='{TESTS}' \
                 ON0='{first}' ON1='{second}' SELF='{}' MODULE='{}' SEED={seed} COUNT={OPENS} \
                 EXPECT='{expect}' RULES='{}'",
                world.lib.display(),
                here.join("../../pyverbs/run.py").display(),
                program.display(),
                world.module.display(),
                here.join("../../../kernel-shim/60-starverbs.rules").display(),
            );
            let said = world.run(&format!("{head}\n{SCRIPT}\ntest_{name}\n"), LIMIT)?;
            Ok(said.lines().last().unwrap_or_default().to_owned())
        };
        match &self.act {
            Act::Script(name) => test(world, name),
            Act::KillBoard => {
                test(world, "begin")?;
                world.board.kill();
                test(world, "without_a_board")
            }
            Act::StopBoard => {
                test(world, "begin")?;
                for _ in 0..STOPS {
                    world.board.signal(Signal::SIGSTOP);
                    std::thread::sleep(STOPPED);
                    world.board.signal(Signal::SIGCONT);
                    test(world, "goes_on")?;
                }
                test(world, "end")
            }
            Act::Lie => {
                world.lies.store(true, Ordering::Relaxed);
                let said = test(world, "lied_to");
                world.lies.store(false, Ordering::Relaxed);
                let said = said?;
                test(world, "after_lies").map(|_| said)
            }
            Act::SilenceBoard => {
                test(world, "begin")?;
                world.board.signal(Signal::SIGSTOP);
                test(world, "silent_board")
            }
            Act::Reboot => {
                test(world, "begin")?;
                world.reboot()?;
                test(world, "traffic")
            }
        }
    }
}
