//! The command line: a subset of the options of `ibv_rc_pingpong`.

use std::str::FromStr;

use doorbell::Mtu;

use crate::Result;

pub(crate) const USAGE: &str = "\
usage: rc_pingpong [-d DEVICE] [-g INDEX] [-p PORT] [-s BYTES] [-m MTU] [-n TIMES] [SERVER]
  -d DEVICE   soft0 (default), or a device of the system's such as mlx5_0 or rxe0
  -g INDEX    index of the GID to use (default: the RoCEv2 IPv4 one if there is one)
  -p PORT     TCP port of the server (default 18515)
  -s BYTES    length of the message (default 4096)
  -m MTU      path MTU in bytes (default 1024)
  -n TIMES    how often it goes back and forth (default 1000)
  SERVER      name or address of the server; without it this is the server";

#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) device: String,
    pub(crate) gid_index: Option<u8>,
    pub(crate) port: u16,
    pub(crate) size: usize,
    pub(crate) mtu: Mtu,
    pub(crate) times: u32,
    /// `None`: this is the server.
    pub(crate) server: Option<String>,
}

impl Options {
    pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self {
            device: "soft0".to_owned(),
            gid_index: None,
            port: 18515,
            size: 4096,
            mtu: Mtu::B1024,
            times: 1000,
            server: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "-d" => options.device = value()?,
                "-g" => options.gid_index = Some(number(&arg, &value()?)?),
                "-p" => options.port = number(&arg, &value()?)?,
                "-s" => options.size = number(&arg, &value()?)?,
                "-n" => options.times = number(&arg, &value()?)?,
                "-m" => {
                    let bytes = number(&arg, &value()?)?;
                    options.mtu = Mtu::from_bytes(bytes).ok_or("-m takes 256, 512, 1024, 2048 or 4096")?;
                }
                _ if arg.starts_with('-') => return Err(format!("{arg}: no such option").into()),
                _ => options.server = Some(arg),
            }
        }
        if options.size == 0 || options.times == 0 {
            return Err("-s and -n take at least 1".into());
        }
        Ok(options)
    }
}

fn number<T: FromStr>(option: &str, value: &str) -> Result<T> {
    value
        .parse()
        .map_err(|_| format!("{option} {value}: not a number in its range").into())
}
