-- Wireshark dissector for StRoM's RPCs (docs/strom.md), beside what Wireshark says of RoCEv2.
--
--   tshark -X lua_script:docs/strom.lua -r file -Y strom -V
--   Wireshark: put it into the folder of personal Lua plugins (Help > About Wireshark > Folders)
--
-- RPCs have op-codes 0x18 to 0x1c on queue pairs of the dialect, which ends agree on by op-code 0xc4. 0x1c is
-- FLUSH on others: a packet of it is an RPC WRITE where its queue pair is known to speak the dialect. An
-- answer is a WRITE whose last four bytes are "StRM".

local strom = Proto("strom", "StRoM (RPCs of the card)")

local OPCODES = {
	[0x18] = "RPC", [0x19] = "RPC WRITE First", [0x1a] = "RPC WRITE Middle", [0x1b] = "RPC WRITE Last",
	[0x1c] = "RPC WRITE Only",
}
local CODES = {
	[0] = "OK", [1] = "NO_KERNEL", [2] = "BAD_PARAM", [3] = "NOT_FOUND", [4] = "RETRIES", [5] = "ACCESS",
	[6] = "OVERFLOW", [7] = "FAULT",
}
local DIALECTS = { [0] = "plain", [1] = "StRoM" }
-- WRITE Last and Only, without and with immediate, and the bytes of their headers behind the BTH.
local WRITES = { [0x08] = 0, [0x09] = 4, [0x0a] = 16, [0x0b] = 20 }
local BTH, RETH, DETH, HEAD, RECORD, CRC, UDP = 12, 16, 8, 24, 16, 4, 8
local MAGIC, ANSWER = 0x4d527453, 0x100

local f = {
	op = ProtoField.uint64("strom.op", "RPC op-code", base.HEX),
	len = ProtoField.uint32("strom.length", "Length of the message", base.DEC),
	addr = ProtoField.uint64("strom.target.addr", "Answer: address of the region", base.HEX),
	rkey = ProtoField.uint32("strom.target.rkey", "Answer: its key", base.HEX),
	room = ProtoField.uint32("strom.target.length", "Answer: its length", base.DEC),
	imm = ProtoField.uint32("strom.target.imm", "Answer: immediate data", base.HEX),
	flags = ProtoField.uint32("strom.target.flags", "Answer: flags", base.HEX),
	params = ProtoField.bytes("strom.params", "Parameters"),
	data = ProtoField.bytes("strom.stream", "Payload"),
	record_op = ProtoField.uint32("strom.record.op", "RPC op-code, low half", base.HEX),
	record_len = ProtoField.uint32("strom.record.length", "Bytes of data", base.DEC),
	code = ProtoField.uint32("strom.record.code", "Code", base.DEC, CODES),
	dialect = ProtoField.uint8("strom.dialect", "Dialect", base.DEC, DIALECTS),
	is_answer = ProtoField.bool("strom.dialect.answer", "Answer"),
}
strom.fields = f

local opcode, udp_length = Field.new("infiniband.bth.opcode"), Field.new("udp.length")

-- Queue pairs that speak the dialect, by address and number.
local speaks = {}
local function name(address, qpn) return tostring(address) .. " " .. qpn end

local function rpc(tvb, at, stop, tree)
	tree:add(f.op, tvb(at, 8))
	tree:add(f.len, tvb(at + 12, 4))
	local text = " op 0x" .. tvb(at, 8):uint64():tohex():gsub("^0+(.)", "%1")
	at = at + RETH
	if stop < at + HEAD then return text .. " (short)" end
	tree:add_le(f.addr, tvb(at, 8))
	tree:add_le(f.rkey, tvb(at + 8, 4))
	tree:add_le(f.room, tvb(at + 12, 4))
	tree:add(f.imm, tvb(at + 16, 4))
	tree:add_le(f.flags, tvb(at + 20, 4))
	at = at + HEAD
	if at < stop then tree:add(f.params, tvb(at, stop - at)) end
	return text .. string.format(", %d bytes of parameters", stop - at)
end

local function stream(tvb, at, stop, code, tree)
	local text = ""
	if code == 0x19 or code == 0x1c then
		tree:add(f.op, tvb(at, 8))
		tree:add(f.len, tvb(at + 12, 4))
		text = " op 0x" .. tvb(at, 8):uint64():tohex():gsub("^0+(.)", "%1")
		at = at + RETH
	end
	if at < stop then tree:add(f.data, tvb(at, stop - at)) end
	return text .. string.format(", %d bytes", stop - at)
end

local function dialect(tvb, at, pinfo, tree)
	local word = tvb(at + DETH, 4):uint()
	local kind, answer = bit.band(word, 0xff), bit.band(word, ANSWER) ~= 0
	tree:add(f.dialect, tvb(at + DETH + 3, 1))
	tree:add(f.is_answer, tvb(at + DETH + 2, 1), answer)
	if kind == 1 then speaks[name(pinfo.src, tvb(at + 5, 3):uint())] = true end
	return (answer and "says " or "asks as ") .. (DIALECTS[kind] or "?")
end

local function answered(tvb, stop, tree)
	local at = stop - RECORD
	tree:add_le(f.record_op, tvb(at, 4))
	tree:add_le(f.record_len, tvb(at + 4, 4))
	tree:add_le(f.code, tvb(at + 8, 4))
	return string.format("%s, %d bytes", CODES[tvb(at + 8, 4):le_uint()] or "?", tvb(at + 4, 4):le_uint())
end

-- What kind of packet it is, and what it says; nil: none of StRoM's.
local function read(tvb, at, stop, code, pinfo, root)
	local peer, headers = name(pinfo.dst, tvb(at + 5, 3):uint()), at + BTH
	local is_rpc = code == 0x18 or code == 0x19 or code == 0x1a or code == 0x1b
	if is_rpc then speaks[peer] = true end
	local body = WRITES[code] and headers + WRITES[code]
	local tree = function() return root:add(strom, tvb(headers, stop - headers)) end
	if code == 0x18 and stop >= headers + RETH then
		return OPCODES[code] .. rpc(tvb, headers, stop, tree())
	elseif is_rpc or (code == 0x1c and speaks[peer] and stop >= headers + RETH) then
		return OPCODES[code] .. stream(tvb, headers, stop, code, tree())
	elseif code == 0xc4 and stop >= headers + DETH + 4 then
		return "Dialect: " .. dialect(tvb, headers, pinfo, tree())
	elseif body and stop >= body + RECORD and tvb(stop - 4, 4):le_uint() == MAGIC then
		return "RPC answer: " .. answered(tvb, stop, tree())
	end
end

function strom.dissector(tvb, pinfo, root)
	local field, length = opcode(), udp_length()
	if not field or not length then return end
	local at = field.offset
	local stop = at + length.value - UDP - CRC - bit.band(bit.rshift(tvb(at + 1, 1):uint(), 4), 3)
	if stop < at + BTH or stop > tvb:len() then return end
	local text = read(tvb, at, stop, field.value, pinfo, root)
	if text then
		pinfo.cols.protocol = "StRoM"
		pinfo.cols.info = string.format("%s QPN 0x%06x", text, tvb(at + 5, 3):uint())
	end
end

register_postdissector(strom)
