//! The header of a safetensors file: the length of a JSON object, which gives type, shape and
//! place of each tensor; the tensors' bytes follow, without gaps.

use std::collections::BTreeMap;

use doorbell::gpudirect::storage::{File, Storage};
use doorbell_examples::Error;
use serde_json::{Map, Value, json};

/// The maximum length of the JSON object, as other readers have it.
const MAX_HEADER: u64 = 100_000_000;
/// The header is padded to pages, so that the tensors begin where O_DIRECT can.
const PAGE: usize = 4096;
const METADATA: &str = "__metadata__";
const CRC: &str = "crc32:";

pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Where it begins among the tensors' bytes.
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) crc: Option<u32>,
}

/// The tensors, in the order of their bytes.
pub(crate) struct Header {
    pub(crate) tensors: Vec<Tensor>,
}

/// Bits of an element.
fn bits(dtype: &str) -> Option<usize> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

fn bytes_of(dtype: &str, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size))?;
    Some(elements.checked_mul(bits(dtype)?)? / 8)
}

impl Header {
    pub(crate) fn of(tensors: &[(&str, &str, &[usize])]) -> Result<Self, Error> {
        let mut start = 0;
        let placed = tensors.iter().map(|(name, dtype, shape)| {
            let len = bytes_of(dtype, shape).ok_or("a tensor of an unknown type, or too large")?;
            let tensor = Tensor {
                name: (*name).to_owned(),
                dtype: (*dtype).to_owned(),
                shape: shape.to_vec(),
                start,
                len,
                crc: None,
            };
            start += len;
            Ok(tensor)
        });
        let tensors = placed.collect::<Result<_, Error>>()?;
        Ok(Self { tensors })
    }

    /// The bytes of all tensors.
    pub(crate) fn data_len(&self) -> usize {
        self.tensors.last().map_or(0, |last| last.start + last.len)
    }

    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let mut object = Map::new();
        let sums: BTreeMap<String, String> = self
            .tensors
            .iter()
            .filter_map(|tensor| Some((format!("{CRC}{}", tensor.name), format!("{:08x}", tensor.crc?))))
            .collect();
        object.insert(METADATA.to_owned(), json!(sums));
        for Tensor {
            name,
            dtype,
            shape,
            start,
            len,
            ..
        } in &self.tensors
        {
            let place = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, start + len]});
            object.insert(name.clone(), place);
        }
        let mut text = serde_json::to_vec(&object)?;
        let whole = (8 + text.len()).next_multiple_of(PAGE);
        text.resize(whole - 8, b' ');
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.append(&mut text);
        Ok(bytes)
    }

    /// Reads and checks a file's header: with the offset of the tensors' bytes.
    pub(crate) fn read(storage: &mut Storage, file: &File) -> Result<(Self, u64), Error> {
        let whole = file.len()?;
        let mut len = [0; 8];
        storage.read_exact_at(file, 0, &mut len[..])?;
        let len = u64::from_le_bytes(len);
        let refuse = |why: String| -> Error { format!("{}: no safetensors file: {why}", file.path().display()).into() };
        if len > MAX_HEADER || len > whole.saturating_sub(8) {
            return Err(refuse(format!("a header of {len} bytes")));
        }
        let mut text = vec![0; usize::try_from(len)?];
        storage.read_exact_at(file, 8, &mut text)?;
        let object: Map<String, Value> = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
        let header = Self::parse(&object, whole - 8 - len).map_err(refuse)?;
        Ok((header, 8 + len))
    }

    /// Checks that the tensors are `data` bytes, each once.
    fn parse(object: &Map<String, Value>, data: u64) -> Result<Self, String> {
        let metadata = object.get(METADATA).and_then(Value::as_object);
        let mut tensors = Vec::new();
        for (name, place) in object.iter().filter(|(name, _)| *name != METADATA) {
            let mut tensor = tensor(name, place).ok_or_else(|| format!("tensor {name:?} is {place}"))?;
            let crc = metadata.and_then(|all| all.get(&format!("{CRC}{name}"))?.as_str());
            tensor.crc = crc.and_then(|crc| u32::from_str_radix(crc, 16).ok());
            tensors.push(tensor);
        }
        tensors.sort_by_key(|tensor| (tensor.start, tensor.len));
        let mut end = 0;
        for Tensor { name, start, len, .. } in &tensors {
            if *start != end {
                return Err(format!(
                    "tensor {name:?} begins at {start}, and the one before ends at {end}"
                ));
            }
            end += len;
        }
        if end as u64 != data {
            return Err(format!("tensors of {end} bytes in {data}"));
        }
        if end == 0 {
            return Err("it has no tensors".to_owned());
        }
        Ok(Self { tensors })
    }
}

/// A tensor whose length is that of its type and shape.
fn tensor(name: &str, place: &Value) -> Option<Tensor> {
    let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
    let dtype = place.get("dtype")?.as_str()?;
    let shape: Vec<usize> = place
        .get("shape")?
        .as_array()?
        .iter()
        .map(number)
        .collect::<Option<_>>()?;
    let [start, end] = place.get("data_offsets")?.as_array()?.as_slice() else {
        return None;
    };
    let (start, end) = (number(start)?, number(end)?);
    let len = end.checked_sub(start)?;
    (bytes_of(dtype, &shape) == Some(len)).then(|| Tensor {
        name: name.to_owned(),
        dtype: dtype.to_owned(),
        shape,
        start,
        len,
        crc: None,
    })
}
