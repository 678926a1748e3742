//! `starverbs info`: what devices, GIDs and settings a program started now would see.

use serde_json::{Value, json};
use starverbs_backend::host;
use starverbs_settings::{KEYS, Link, LinkTrust, Settings};
use starverbs_verbs::{Context, DeviceAttr, GidEntry, PortAttr, device_name};

use crate::{Failure, run};

/// Show the device, its GIDs and the settings that a program will see.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// List all settings: values, what is allowed, what they do
    #[arg(long)]
    settings: bool,
}

/// The device as a program finds it.
struct DeviceFacts {
    attr: DeviceAttr,
    port: PortAttr,
    gids: Vec<GidEntry>,
}

impl DeviceFacts {
    /// Opens the device and asks, as a program does; it is closed when this process ends.
    fn ask() -> Result<DeviceFacts, Failure> {
        let failure = |error| Failure::new(1, format!("{}: {error}", device_name()));
        let context = Context::open().map_err(failure)?;
        let port = context.query_port(1).map_err(failure)?;
        Ok(DeviceFacts { attr: context.device_attr().clone(), port, gids: context.gid_table() })
    }

    fn to_json(&self) -> Value {
        let gid = |entry: &GidEntry| {
            let address = host::ip_of(entry.gid).to_string();
            json!({ "index": entry.index, "address": address, "interface": entry.netdev })
        };
        json!({
            "name": device_name(),
            "node_guid": format!("{:016x}", self.attr.node_guid),
            "active_mtu": self.port.active_mtu.bytes(),
            "max_mtu": self.port.max_mtu.bytes(),
            "gids": self.gids.iter().map(gid).collect::<Vec<_>>(),
        })
    }

    fn to_text(&self) -> String {
        let mut text = format!(
            "device {}   port 1, Ethernet, RoCEv2, active_mtu {} (of {}), node GUID {:016x}\n",
            device_name(),
            self.port.active_mtu.bytes(),
            self.port.max_mtu.bytes(),
            self.attr.node_guid
        );
        for entry in &self.gids {
            text += &format!("  GID[{}]  {}  on {}\n", entry.index, host::ip_of(entry.gid), entry.netdev);
        }
        text
    }
}

/// Prints what was asked for.
pub(crate) fn info(args: &Args) -> Result<(), Failure> {
    let settings = Settings::load().map_err(|e| Failure::new(1, e))?;
    if args.settings && !args.json {
        print!("{}", settings_text(&settings));
        return Ok(());
    }
    let device = DeviceFacts::ask()?;
    let library = run::library_dir(None).map(|dir| dir.join("libibverbs.so.1"));
    if args.json {
        let text = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "library": library.ok(),
            "device": device.to_json(),
            "same_host": same_host(&settings),
            "settings": settings_json(&settings),
        });
        println!("{text:#}");
        return Ok(());
    }
    print!("{}", device.to_text());
    match library {
        Ok(path) => println!("library {}", path.display()),
        Err(failure) => println!("library {}", failure.message),
    }
    println!("same host: {}", same_host(&settings));
    print!("{}", changed_text(&settings));
    Ok(())
}

/// How a program reaches others of this host, where they allow the same; `starverbs stat --qp` says what came
/// of it.
fn same_host(settings: &Settings) -> &'static str {
    let hurt = settings.fault.is_active() || settings.pcap.is_some();
    match settings.link_trust {
        _ if settings.link == Link::Udp || hurt || settings.qpc_cache.is_some() => "packets",
        LinkTrust::None => "shared memory; each card executes what it is asked for",
        LinkTrust::User => "shared memory; that of one user's processes by mapped files and by descriptor",
        LinkTrust::Trace => "shared memory; that of one user's processes by mapped files, descriptor and PID",
    }
}

/// The settings that are not at their default.
fn changed_text(settings: &Settings) -> String {
    let changed = KEYS.iter().filter(|key| key.show(settings) != key.default());
    let lines: String = changed.map(|key| format!("  {}={}\n", key.variable(), key.show(settings))).collect();
    if lines.is_empty() {
        "settings: all at their defaults (`starverbs info --settings` lists them)\n".to_owned()
    } else {
        format!("settings that are not at their default:\n{lines}")
    }
}

fn settings_json(settings: &Settings) -> Value {
    let entry = |key: &starverbs_settings::Key| {
        let value = json!({
            "value": key.show(settings), "default": key.default(), "allowed": key.allowed, "about": key.about,
        });
        (key.variable(), value)
    };
    KEYS.iter().map(entry).collect::<serde_json::Map<_, _>>().into()
}

fn settings_text(settings: &Settings) -> String {
    let mut text = String::new();
    for key in KEYS {
        let (value, default) = (key.show(settings), key.default());
        let note = if value == default { String::new() } else { format!("   (default {default})") };
        text +=
            &format!("{}={value}{note}\n    {}\n    allowed: {}\n", key.variable(), key.about, key.allowed);
    }
    text += "\nA setting is given in the environment, or in lower case without STARVERBS_ in a TOML file.\n";
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_listed_with_its_value() {
        let env = [("STARVERBS_PORT".to_owned(), "5000".to_owned())];
        let settings = Settings::from_sources(env.into_iter(), None).unwrap();
        let text = settings_text(&settings);
        assert!(KEYS.iter().all(|key| text.contains(&key.variable())));
        assert!(text.contains("STARVERBS_PORT=5000   (default 4791)"), "{text}");
        assert_eq!(settings_json(&settings)["STARVERBS_PORT"]["value"], "5000");
        assert!(changed_text(&settings).ends_with(":\n  STARVERBS_PORT=5000\n"));
        assert!(same_host(&settings).contains("descriptor"));
        assert_eq!(same_host(&Settings { link: Link::Udp, ..settings }), "packets");
    }
}
