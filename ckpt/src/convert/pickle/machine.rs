//! The stack machine that interprets the opcodes of a pickle.

use std::collections::HashMap;

use super::{Bad, Id, Pickle, PickleNode, PickleObject, Result};

/// More nodes than the largest known metadata has; they take about 4 GiB.
const NODES_MAX: usize = 1 << 26;

/// Class names are copied, and a text in the memo can be used as a name many times.
const CLASS_BYTES_MAX: usize = 4 << 10;

/// Parses the pickle at the start of the bytes, and returns its length.
pub(super) fn read(bytes: &[u8]) -> Result<(Pickle, usize)> {
    let mut machine = Machine { bytes, ..Machine::default() };
    let root = machine.run()?;
    Ok((Pickle { nodes: machine.nodes, root }, machine.at))
}

#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<PickleNode>,
    stack: Vec<Id>,
    /// The height of the stack at each mark.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Id> {
        loop {
            let opcode = self.take(1)?[0];
            if opcode == b'.' {
                return self.pop();
            }
            let known =
                self.constants(opcode)? || self.containers(opcode)? || self.objects(opcode)?;
            if !known {
                self.at -= 1;
                return self.bad(format!("unsupported opcode {opcode:#04x}"));
            }
            if self.nodes.len().max(self.stack.len()).max(self.marks.len()) > NODES_MAX {
                return self.bad(format!("more than {NODES_MAX} objects"));
            }
        }
    }

    /// Numbers, texts and bytes.
    fn constants(&mut self, opcode: u8) -> Result<bool> {
        let node = match opcode {
            b'N' => PickleNode::None,
            0x88 => PickleNode::Bool(true),
            0x89 => PickleNode::Bool(false),
            b'J' => PickleNode::Int(i32::from_le_bytes(self.fixed()?).into()),
            b'K' => PickleNode::Int(self.take(1)?[0].into()),
            b'M' => PickleNode::Int(u16::from_le_bytes(self.fixed()?).into()),
            b'I' => match self.line()?.as_str() {
                "00" => PickleNode::Bool(false),
                "01" => PickleNode::Bool(true),
                digits => self.decimal(digits)?,
            },
            b'L' => {
                let line = self.line()?;
                self.decimal(line.trim_end_matches('L'))?
            }
            0x8a => {
                let len = self.take(1)?[0].into();
                long(self.take(len)?)
            }
            0x8b => {
                let len = u32::from_le_bytes(self.fixed()?) as usize;
                long(self.take(len)?)
            }
            b'F' => match self.line()?.parse() {
                Ok(value) => PickleNode::Float(value),
                Err(_) => return self.bad("an invalid number".to_owned()),
            },
            b'G' => {
                let mut bytes: [u8; 8] = self.fixed()?;
                bytes.reverse();
                PickleNode::Float(f64::from_le_bytes(bytes))
            }
            b'S' => {
                let line = self.line()?;
                PickleNode::Text(line.trim_matches(['\'', '"']).to_owned())
            }
            b'V' => PickleNode::Text(self.line()?),
            b'X' | b'T' | 0x8d | 0x8c | b'U' => {
                let bytes = self.counted(opcode)?;
                PickleNode::Text(String::from_utf8_lossy(bytes).into_owned())
            }
            b'B' | b'C' | 0x8e | 0x96 => PickleNode::Bytes(self.counted(opcode)?.to_vec()),
            _ => return Ok(false),
        };
        self.push(node);
        Ok(true)
    }

    /// Lists, tuples, dicts and sets, and the stack.
    fn containers(&mut self, opcode: u8) -> Result<bool> {
        match opcode {
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b'}' => self.push(PickleNode::Dict(Vec::new())),
            b']' | 0x8f => self.push(PickleNode::List(Vec::new())),
            b')' => self.push(PickleNode::Tuple(Vec::new())),
            b't' => {
                let items = self.pop_mark()?;
                self.push(PickleNode::Tuple(items));
            }
            b'l' | 0x91 => {
                let items = self.pop_mark()?;
                self.push(PickleNode::List(items));
            }
            b'd' => {
                let items = self.pop_mark()?;
                let pairs = self.paired(&items)?;
                self.push(PickleNode::Dict(pairs));
            }
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let items = self.pop_many(count)?;
                self.push(PickleNode::Tuple(items));
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b's' => {
                let items = self.pop_many(2)?;
                self.set(&items)?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Classes, calls, the memo and the frame of the stream.
    fn objects(&mut self, opcode: u8) -> Result<bool> {
        match opcode {
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(PickleNode::Global(module, name));
            }
            0x93 => {
                let both = self.pop_many(2)?;
                let text = |id: Id| match &self.nodes[id] {
                    PickleNode::Text(text) if text.len() <= CLASS_BYTES_MAX => Some(text.clone()),
                    _ => None,
                };
                let (Some(module), Some(name)) = (text(both[0]), text(both[1])) else {
                    return self.bad("a class name that is not text of at most 4 KiB".to_owned());
                };
                self.push(PickleNode::Global(module, name));
            }
            b'R' | 0x81 => {
                let both = self.pop_many(2)?;
                self.build(both[0], both[1]);
            }
            0x92 => {
                let three = self.pop_many(3)?;
                self.build(three[0], three[1]);
            }
            b'o' => {
                let mut items = self.pop_mark()?;
                if items.is_empty() {
                    return self.bad("an object without a class".to_owned());
                }
                let class = items.remove(0);
                let args = self.add(PickleNode::Tuple(items));
                self.build(class, args);
            }
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                let items = self.pop_mark()?;
                let (class, args) = (
                    self.add(PickleNode::Global(module, name)),
                    self.add(PickleNode::Tuple(items)),
                );
                self.build(class, args);
            }
            b'b' => {
                let state = self.pop()?;
                let object = self.top()?;
                if let PickleNode::Built(built) = &mut self.nodes[object] {
                    built.state = Some(state);
                }
            }
            b'Q' => {
                let name = self.pop()?;
                self.push(PickleNode::Persistent(name));
            }
            b'P' => {
                let line = self.line()?;
                let name = self.add(PickleNode::Text(line));
                self.push(PickleNode::Persistent(name));
            }
            _ => return self.memoize(opcode),
        }
        Ok(true)
    }

    fn memoize(&mut self, opcode: u8) -> Result<bool> {
        match opcode {
            b'p' | b'q' | b'r' | 0x94 => {
                let key = if opcode == 0x94 { self.memo.len() as u64 } else { self.key(opcode)? };
                let top = self.top()?;
                self.memo.insert(key, top);
            }
            b'g' | b'h' | b'j' => {
                let key = self.key(opcode)?;
                let Some(&id) = self.memo.get(&key) else {
                    return self.bad(format!("memo key {key}, which is not set"));
                };
                self.stack.push(id);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn key(&mut self, opcode: u8) -> Result<u64> {
        match opcode {
            b'q' | b'h' => Ok(self.take(1)?[0].into()),
            b'r' | b'j' => Ok(u32::from_le_bytes(self.fixed()?).into()),
            _ => match self.line()?.parse() {
                Ok(key) => Ok(key),
                Err(_) => self.bad("a memo key that is not a number".to_owned()),
            },
        }
    }

    fn build(&mut self, class: Id, args: Id) {
        let (state, items, pairs) = (None, Vec::new(), Vec::new());
        self.push(PickleNode::Built(Box::new(PickleObject { class, args, state, items, pairs })));
    }

    fn append(&mut self, items: Vec<Id>) -> Result<()> {
        let top = self.top()?;
        match &mut self.nodes[top] {
            PickleNode::List(list) => list.extend(items),
            PickleNode::Built(built) => built.items.extend(items),
            _ => return self.bad("items for an object that is not a list".to_owned()),
        }
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Result<()> {
        let pairs = self.paired(items)?;
        let top = self.top()?;
        match &mut self.nodes[top] {
            PickleNode::Dict(dict) => dict.extend(pairs),
            PickleNode::Built(built) => built.pairs.extend(pairs),
            _ => return self.bad("pairs for an object that is not a dict".to_owned()),
        }
        Ok(())
    }

    fn paired(&self, items: &[Id]) -> Result<Vec<(Id, Id)>> {
        if !items.len().is_multiple_of(2) {
            return self.bad("a key without a value".to_owned());
        }
        Ok(items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    fn decimal(&self, digits: &str) -> Result<PickleNode> {
        match digits.parse() {
            Ok(value) => Ok(PickleNode::Int(value)),
            // No importer uses integers beyond 64 bits.
            Err(_) if digits.trim_start_matches('-').bytes().all(|b| b.is_ascii_digit()) => {
                Ok(PickleNode::Bytes(digits.as_bytes().to_vec()))
            }
            Err(_) => self.bad("an invalid number".to_owned()),
        }
    }

    fn counted(&mut self, opcode: u8) -> Result<&[u8]> {
        let len = match opcode {
            b'U' | b'C' | 0x8c => self.take(1)?[0].into(),
            b'X' | b'T' | b'B' => u32::from_le_bytes(self.fixed()?).into(),
            _ => u64::from_le_bytes(self.fixed()?),
        };
        self.take(usize::try_from(len).unwrap_or(usize::MAX))
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.iter().position(|&byte| byte == b'\n') else {
            return self.short();
        };
        self.at += len + 1;
        Ok(String::from_utf8_lossy(&rest[..len]).into_owned())
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into().expect("as many as were taken"))
    }

    fn take(&mut self, len: usize) -> Result<&[u8]> {
        if len > self.bytes.len() - self.at {
            return self.short();
        }
        self.at += len;
        Ok(&self.bytes[self.at - len..self.at])
    }

    fn add(&mut self, node: PickleNode) -> Id {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    fn push(&mut self, node: PickleNode) {
        let id = self.add(node);
        self.stack.push(id);
    }

    fn pop(&mut self) -> Result<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// The top of the stack, if it is above the last mark.
    fn top(&self) -> Result<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.last() {
            Some(&id) if self.stack.len() > floor => Ok(id),
            _ => self.bad("an empty stack".to_owned()),
        }
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<Id>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(start) if start >= floor => Ok(self.stack.split_off(start)),
            _ => self.bad("an empty stack".to_owned()),
        }
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        match self.marks.pop() {
            Some(mark) => Ok(self.stack.split_off(mark)),
            None => self.bad("no mark".to_owned()),
        }
    }

    fn bad<T>(&self, reason: String) -> Result<T> {
        Err(Bad { offset: self.at, reason, is_short: false })
    }

    fn short<T>(&self) -> Result<T> {
        let reason = "the end of the data".to_owned();
        Err(Bad { offset: self.at, reason, is_short: true })
    }
}

/// A two's complement integer of any length, little-endian.
fn long(bytes: &[u8]) -> PickleNode {
    if bytes.len() > 8 {
        return PickleNode::Bytes(bytes.to_vec());
    }
    let fill = if bytes.last().is_some_and(|&last| last >= 0x80) { 0xff } else { 0 };
    let mut all = [fill; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    PickleNode::Int(i64::from_le_bytes(all))
}
