//! The guest: a kernel in QEMU whose root is the host's file system, read-only, and that runs what it is
//! asked for.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use starverbs_conformance::process::{Process, tail};

use crate::kernel::Kernel;
use crate::net::{ADDRESSES, ADDRESSES_V6, Net, TAP};
use crate::world::Found;

const GUEST: &str = include_str!("../guest.sh");
/// Booting takes about five seconds on an idle machine.
const BOOT: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(20);

/// A running guest. Dropping it ends it, the hard way.
pub(crate) struct Guest {
    qemu: Process,
    share: PathBuf,
    jobs: u32,
    /// The GIDs of rxe0, by index.
    pub gids: Vec<String>,
}

impl Guest {
    /// Boots and waits until rxe0 is there. `folder` takes what host and guest exchange; `mtu` is the guest's
    /// IP MTU.
    pub(crate) fn boot(kernel: &Kernel, net: &Net, folder: &Path, mtu: u32) -> Result<Guest, String> {
        let share = folder.join("share");
        fs::create_dir_all(share.join("jobs")).map_err(|e| format!("{}: {e}", share.display()))?;
        let settings = format!("ADDRESS={}\nADDRESS6={}\nMTU={mtu}\n", ADDRESSES[1], ADDRESSES_V6[1]);
        write(&share.join("settings"), &settings)?;
        write(&share.join("guest.sh"), GUEST)?;
        let console = folder.join("console");
        let mut command = net.command("qemu-system-x86_64");
        command.args(arguments(kernel, &share, &console));
        let qemu = Process::start(command, folder.join("qemu"))?;
        let mut guest = Guest { qemu, share, jobs: 0, gids: Vec::new() };
        guest.await_ready(&console)?;
        Ok(guest)
    }

    fn await_ready(&mut self, console: &Path) -> Result<(), String> {
        let file = self.share.join("gids");
        let deadline = Instant::now() + BOOT;
        while !file.exists() {
            if self.qemu.ended().is_some() || Instant::now() > deadline {
                let said = fs::read_to_string(console).unwrap_or_default();
                return Err(format!(
                    "the guest does not come up:\n{}\n{}",
                    tail(&self.qemu.output()),
                    tail(&said)
                ));
            }
            std::thread::sleep(POLL);
        }
        let text = fs::read_to_string(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        self.gids = text.lines().filter_map(|line| Some(line.split_once(":")?.1.to_owned())).collect();
        Ok(())
    }

    /// Frames that came from it and went to it so far.
    pub(crate) fn frames(&self) -> u64 {
        let devices = fs::read_to_string(format!("/proc/{}/net/dev", self.qemu.pid())).unwrap_or_default();
        let counts = devices.lines().find_map(|line| line.trim().strip_prefix(TAP)?.strip_prefix(':'));
        let count = |place| counts?.split_ascii_whitespace().nth(place)?.parse::<u64>().ok();
        // The second of the eight figures of each way.
        count(1).unwrap_or(0) + count(9).unwrap_or(0)
    }

    /// Starts `words` in the guest; the job is told of as listening when it is `found` there.
    pub(crate) fn start(&mut self, words: &[&str], found: Found) -> Result<Job, String> {
        self.jobs += 1;
        let base = self.share.join("jobs").join(self.jobs.to_string());
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let (line, mark) = (quoted.join(" "), self.jobs);
        let listens = match found {
            Found::Tcp(port) => format!("grep -q ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6"),
            Found::Service(port) => {
                format!("rdma resource show cm_id | grep -Eq 'state LISTEN .*:{port}( |$)'")
            }
        };
        let script = format!(
            "{line} &\nprogram=$!\n\
             until {listens} || ! kill -0 $program; do sleep 0.02; done 2>/dev/null\n\
             touch {mark}.listening\nwait $program\n"
        );
        let fresh = base.with_extension("new");
        write(&fresh, &script)?;
        fs::rename(&fresh, base.with_extension("run")).map_err(|e| format!("{}: {e}", fresh.display()))?;
        Ok(Job { base })
    }

    /// Lets the guest end, or ends it. What is dropped without this is ended the hard way.
    pub(crate) fn stop(&mut self) {
        let _ = fs::write(self.share.join("stop"), "");
        let _ = self.qemu.wait_until(Instant::now() + Duration::from_secs(10));
        self.qemu.kill();
    }
}

/// QEMU's arguments: no device but those that are needed, plain emulation. Each path is a word of its own,
/// whatever it holds.
fn arguments(kernel: &Kernel, share: &Path, console: &Path) -> Vec<String> {
    let plain = "-accel tcg,thread=multi -cpu max -M q35 -smp 2 -m 2048 -nodefaults -no-user-config \
                 -no-reboot -display none -monitor none -device virtio-9p-pci,fsdev=r,mount_tag=hostroot \
                 -device virtio-9p-pci,fsdev=s,mount_tag=share -device virtio-net-pci,netdev=n";
    let mut words: Vec<String> = plain.split_ascii_whitespace().map(str::to_owned).collect();
    let line = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off net.ifnames=0 tsc=reliable \
                random.trust_cpu=on";
    for (option, value) in [
        ("-serial", format!("file:{}", console.display())),
        ("-kernel", kernel.image.display().to_string()),
        ("-initrd", kernel.initramfs.display().to_string()),
        ("-fsdev", "local,id=r,path=/,security_model=none,readonly=on,multidevs=remap".to_owned()),
        ("-fsdev", format!("local,id=s,path={},security_model=none", share.display())),
        ("-netdev", format!("tap,id=n,ifname={TAP},script=no,downscript=no")),
        ("-append", line.to_owned()),
    ] {
        words.extend([option.to_owned(), value]);
    }
    words
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
}

/// A program in the guest. Dropping it kills it.
pub(crate) struct Job {
    base: PathBuf,
}

impl Job {
    /// The exit status, if it has ended.
    pub(crate) fn ended(&self) -> Option<i32> {
        fs::read_to_string(self.base.with_extension("status")).ok()?.trim().parse().ok()
    }

    /// Whether it is found where its client looks for it, or has ended.
    pub(crate) fn listens(&self) -> bool {
        self.base.with_extension("listening").exists()
    }

    /// All it wrote so far, errors last.
    pub(crate) fn output(&self) -> String {
        let read = |extension| fs::read(self.base.with_extension(extension)).unwrap_or_default();
        String::from_utf8_lossy(&[read("out"), read("err")].concat()).into_owned()
    }

    /// Asks for its end.
    pub(crate) fn kill(&self) {
        if self.ended().is_none() {
            let _ = fs::write(self.base.with_extension("kill"), "");
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
    }
}
