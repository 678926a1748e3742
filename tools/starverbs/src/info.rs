//! `starverbs info`: what devices, GIDs and settings a program started now would see.

use serde_json::{Value, json};
use starverbs_settings::{KEYS, Settings};

use crate::Failure;

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

/// Prints what was asked for.
pub(crate) fn info(args: &Args) -> Result<(), Failure> {
    let settings = Settings::load().map_err(|e| Failure::new(1, e))?;
    if args.json {
        let text = json!({ "version": env!("CARGO_PKG_VERSION"), "settings": settings_json(&settings) });
        println!("{text:#}");
    } else if args.settings {
        print!("{}", settings_text(&settings));
    } else {
        println!("starverbs {}", env!("CARGO_PKG_VERSION"));
    }
    Ok(())
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
    }
}
