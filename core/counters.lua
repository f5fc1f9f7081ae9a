-- Atomic counters, one script call per operation. KEYS[1] is the group's hash tag and the prefix of
-- every other key, so a group is in one slot of a Redis Cluster. ARGV: operation, now in ms (-1: the
-- server's clock), msgpack of the arguments. Replies are msgpack.
--
--   :t:<key>  three doubles: used, carry, at  a token bucket
--   :c:<key>  doubles: spent, held, seeded    money under a cap, nano-units; seeded is 0 or 1
--   :s:<key>  sorted set id -> lease expiry   slots
--   :h:<id>   msgpack                         a reservation
--   :l        sorted set id -> lease expiry   every reservation; a kept one has two leases
--   :b        ms                              when this data began
--
-- The sum of the reservations' money is what their caps hold: a call pays and saves together, a
-- record lasts as long as its money, and each call first ends the leases that have expired.
--
-- Each Redis command has a fixed cost, so a call reads all its values with one MGET and sets a value
-- together with its expiry. Numbers are passed as text, because Redis would format them as floats.

local base, call, fmod = KEYS[1], redis.call, math.fmod
local pack, unpacked, format = struct.pack, struct.unpack, string.format
local DAY_MS = 86400000
local KEPT_MS = 7 * DAY_MS -- for how long a kept reservation's money outlives its lease
local MONEY = '3456000000' -- 40 days, of money and reservations alike
local MARKED = '3542400000' -- one day more, because the sets' expiry is extended once a day
-- The state of a reservation. In LATE its lease has expired, and its money waits for the settlement.
local LIVE, KEPT, LATE = 0, 1, 2
local LIVE_BYTE, KEPT_BYTE = cmsgpack.pack(LIVE), cmsgpack.pack(KEPT)
local LONGEST_MS = 1e14 -- Redis rejects an expiry that overflows its clock
local SWEEP = '100'

local now = tonumber(ARGV[2])
-- How long a bucket's key outlives its refill: an injected clock may stand still while Redis's runs.
local slack_ms = now < 0 and 1000 or KEPT_MS
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local now_text = format('%d', now)
local expiries = {} -- as text, by number: they repeat from take to take

-- take: key, capacity, period_ms, amount, keep, shadow. Returns used, carry, at.
local function refilled(take, raw)
  if not raw then return 0, 0, now end
  local used, carry, at = unpacked('<ddd', raw)
  local elapsed = now - at
  if elapsed > 0 then
    local capacity, period = take[2], take[3]
    local rest = fmod(elapsed, period)
    local slow = fmod(capacity, period)
    local part = rest * slow + carry
    carry = fmod(part, period)
    used = used - (elapsed - rest) / period * capacity
    used = used - rest * ((capacity - slow) / period) - (part - carry) / period
    at = now
  end
  if used <= 0 then return 0, 0, at end
  return used, carry, at
end

local function store(take, used, carry, at)
  local key = base .. ':t:' .. take[1]
  if used <= 0 then
    call('DEL', key)
    return
  end
  local periods = math.max(1, used / take[2]) -- more than one where an answer went into debt
  local lasts = math.min(math.ceil(periods * take[3]) + slack_ms, LONGEST_MS)
  local expiry = expiries[lasts]
  if not expiry then
    expiry = format('%d', lasts)
    expiries[lasts] = expiry
  end
  call('SET', key, pack('<ddd', used, carry, at), 'PX', expiry)
end

-- The values of `first` (if given), the takes and the caps, in this order.
local function values(first, takes, caps)
  local keys = {first}
  for _, take in ipairs(takes) do keys[#keys + 1] = base .. ':t:' .. take[1] end
  for _, cap in ipairs(caps) do keys[#keys + 1] = base .. ':c:' .. cap[1] end
  return #keys > 0 and call('MGET', unpack(keys)) or keys
end

-- Sets the takes to these amounts; returns the caps' values, read in the same MGET.
local function change(takes, amounts, caps)
  local changed, differences = {}, {}
  for index, amount in ipairs(amounts) do
    local take = takes[index]
    if amount ~= take[4] then
      changed[#changed + 1] = take
      differences[#changed] = amount - take[4]
      take[4] = amount
    end
  end
  local raws = values(nil, changed, caps)
  for index, take in ipairs(changed) do
    local used, carry, at = refilled(take, raws[index])
    used = math.max(0, used + differences[index])
    if used > 0 or raws[index] then store(take, used, carry, at) end
  end
  local moneys = {}
  for index = 1, #caps do moneys[index] = raws[#changed + index] end
  return moneys
end

-- Returns spent, held, seeded. Without `seeded`, what was spent before this data began is unknown.
local function money(raw)
  if not raw then return 0, 0, 0 end
  return unpacked('<ddd', raw)
end

local function pay(cap, spent, held, seeded)
  call('SET', base .. ':c:' .. cap[1], pack('<ddd', spent, held, seeded), 'PX', MONEY)
end

-- Returns args of `reserve`, money held, answer, state. `args` is stored as received until it changes.
local function load(id)
  local raw = call('GET', base .. ':h:' .. id)
  if raw then return cmsgpack.unpack(raw) end
end

-- Whoever does not pay in the same call keeps the record's expiry.
local function save(id, packed, paid)
  if paid then
    call('SET', base .. ':h:' .. id, packed, 'PX', MONEY)
  else
    call('SET', base .. ':h:' .. id, packed, 'KEEPTTL')
  end
end

-- The first call of a day extends the set's expiry: only then is the day's marker (score inf) new.
-- `news` is how many members are new then: the marker, and the id unless it is renewed.
local function enter(key, id, lease, news)
  local ends = format('%d', now + lease)
  local mark = 'day ' .. math.floor(now / DAY_MS)
  if call('ZADD', key, ends, id, 'inf', mark) < news then return end
  call('ZREMRANGEBYSCORE', key, 'inf', 'inf')
  call('ZADD', key, 'inf', mark)
  call('PEXPIRE', key, MARKED)
end

-- A slot's holders: the id, and one more member for each further slot that it takes.
local function hold(slot, id, lease, news)
  local key = base .. ':s:' .. slot[1]
  enter(key, id, lease, news)
  for number = 2, slot[4] or 1 do
    call('ZADD', key, format('%d', now + lease), id .. ' ' .. number)
  end
end

local function leave(id, slots)
  call('ZREM', base .. ':l', id)
  for _, slot in ipairs(slots) do
    local key = base .. ':s:' .. slot[1]
    call('ZREM', key, id)
    for number = 2, slot[4] or 1 do call('ZREM', key, id .. ' ' .. number) end
  end
end

local function give_back(caps, held)
  if held == 0 then return end
  for _, cap in ipairs(caps) do
    local spent, others, seeded = money(call('GET', base .. ':c:' .. cap[1]))
    pay(cap, spent, others - held, seeded)
  end
end

-- An expired lease returns its slots and the amounts above `keep`, and its money too unless it is
-- kept.
local function sweep()
  local due = call('ZRANGEBYSCORE', base .. ':l', '-inf', now_text, 'LIMIT', '0', SWEEP)
  for _, id in ipairs(due) do
    local args, held, answer, state = load(id)
    if not args then
      call('ZREM', base .. ':l', id)
    else
      -- Without calls nobody sweeps: the time that money waits begins as the lease ended.
      local waits = KEPT_MS - (now - tonumber(call('ZSCORE', base .. ':l', id)))
      leave(id, args[4])
      if state ~= LATE then
        local kept = {}
        for index, take in ipairs(args[3]) do kept[index] = math.min(take[5], take[4]) end
        change(args[3], kept, {})
      end
      if held ~= 0 and state == KEPT and waits > 0 then
        save(id, cmsgpack.pack(args, held, answer, LATE))
        enter(base .. ':l', id, waits, 2)
      else
        give_back(args[7], held)
        call('DEL', base .. ':h:' .. id)
      end
    end
  end
end

-- args: id, lease_ms, takes, slots {key, limit, shadow, count}, need, want, caps {key, cap, spent}, seeds
local function reserve(id, lease, takes, slots, need, want, caps, seeds)
  local raws = values(base .. ':h:' .. id, takes, caps)
  if raws[1] then
    local _, _, answer = cmsgpack.unpack(raws[1])
    return answer
  end
  local states, moments, counts, full, refused = {}, {}, {}, {}, false
  for index, take in ipairs(takes) do
    local used, carry, at = refilled(take, raws[index + 1])
    states[2 * index - 1], states[2 * index], moments[index] = used, carry, at
    if used + take[4] > take[2] then
      full[#full + 1] = take[1]
      refused = refused or not take[6]
    end
  end
  for index, slot in ipairs(slots) do
    counts[index] = call('ZCOUNT', base .. ':s:' .. slot[1], '(' .. now_text, '(inf')
    if counts[index] + (slot[4] or 1) > slot[2] then
      full[#full + 1] = slot[1]
      refused = refused or not slot[3]
    end
  end
  local left, moneys, least, unseeded = {}, {}, want, false
  for index, cap in ipairs(caps) do
    local raw = raws[#takes + 1 + index]
    local spent, held, seeded = money(raw)
    if seeded == 0 then
      unseeded = unseeded or not seeds
      if seeds then
        spent = spent + cap[3]
        pay(cap, spent, held, 1)
      end
    elseif cap[3] > spent then
      spent = cap[3]
      pay(cap, spent, held, 1)
    end
    moneys[index] = {spent, held}
    left[index] = cap[2] - spent - held
    least = math.min(least, left[index])
  end
  if unseeded then return cmsgpack.pack({2, states, counts, full, left, 0}) end
  if refused or (#caps > 0 and least < need) then
    return cmsgpack.pack({0, states, counts, full, left, 0})
  end
  for index, take in ipairs(takes) do
    if take[4] > 0 then
      local used = states[2 * index - 1] + take[4]
      states[2 * index - 1] = used
      store(take, used, states[2 * index], moments[index])
    end
  end
  for index, slot in ipairs(slots) do
    counts[index] = counts[index] + (slot[4] or 1)
    hold(slot, id, lease, 2)
  end
  local granted = #caps > 0 and least or 0
  if granted ~= 0 then
    for index, cap in ipairs(caps) do pay(cap, moneys[index][1], moneys[index][2] + granted, 1) end
  end
  local answer = cmsgpack.pack({1, states, counts, full, left, granted})
  if lease > 0 then
    save(id, ARGV[3] .. cmsgpack.pack(granted, answer, LIVE), true)
    enter(base .. ':l', id, lease, 2)
  end
  return answer
end

local function extend(id, amounts, need, want)
  local args, held, answer, state = load(id)
  if not args then return -1 end
  local takes, caps = args[3], args[7]
  for index, amount in ipairs(amounts) do amounts[index] = math.max(amount, takes[index][4]) end
  local moneys = change(takes, amounts, caps)
  local granted = 0
  if #caps > 0 and want > 0 then
    granted = want
    for index, cap in ipairs(caps) do
      local spent, others, seeded = money(moneys[index])
      if seeded == 0 then return -1 end
      granted = math.min(granted, cap[2] - spent - others)
    end
    if granted < math.max(need, 1) then granted = 0 end
  end
  if granted > 0 then
    for index, cap in ipairs(caps) do
      local spent, others = money(moneys[index])
      pay(cap, spent, others + granted, 1)
    end
  end
  save(id, cmsgpack.pack(args, held + granted, answer, state), granted > 0)
  return granted
end

-- The state is the record's last byte: the rest is neither read nor written.
local function keep(id)
  local key = base .. ':h:' .. id
  local last = call('STRLEN', key) - 1
  if last < 0 or call('GETRANGE', key, '-1', '-1') ~= LIVE_BYTE then return 0 end
  call('SETRANGE', key, format('%d', last), KEPT_BYTE)
  return 1
end

local function settle(id, amounts, spent)
  local args, held = load(id)
  if not args then return 0 end
  local caps = args[7]
  local moneys = change(args[3], amounts, caps)
  leave(id, args[4])
  for index, cap in ipairs(caps) do
    local before, others, seeded = money(moneys[index])
    if held ~= 0 or spent ~= 0 then pay(cap, before + spent, others - held, seeded) end
  end
  call('DEL', base .. ':h:' .. id)
  return 1
end

local function renew(ids, lease)
  for _, id in ipairs(ids) do
    local ends = call('ZSCORE', base .. ':l', id)
    local args, _, _, state = nil, nil, nil, nil
    if ends and tonumber(ends) > now then args, _, _, state = load(id) end
    if args and state ~= LATE then
      enter(base .. ':l', id, lease, 1)
      for _, slot in ipairs(args[4]) do hold(slot, id, lease, 1) end
    end
  end
  return 1
end

-- A reservation of before this data began: its lease, slots and money, with no new take.
local function restore(id, lease, takes, slots, held, caps)
  if call('EXISTS', base .. ':h:' .. id) == 1 then return 0 end
  for _, slot in ipairs(slots) do hold(slot, id, lease, 2) end
  for index, raw in ipairs(values(nil, {}, caps)) do
    local spent, others, seeded = money(raw)
    pay(caps[index], spent, others + held, seeded)
  end
  for _, take in ipairs(takes) do take[4] = 0 end
  save(id, cmsgpack.pack({id, lease, takes, slots, 0, 0, caps}, held, '', LIVE), true)
  enter(base .. ':l', id, lease, 2)
  return 1
end

local function seed(caps)
  for index, raw in ipairs(values(nil, {}, caps)) do
    local spent, held, seeded = money(raw)
    if seeded == 0 then pay(caps[index], spent + caps[index][3], held, 1) end
  end
  return 1
end

local function born()
  call('SET', base .. ':b', now_text, 'NX')
  return cmsgpack.pack({tonumber(call('GET', base .. ':b')), now})
end

-- For each cap: the money that it holds, and the sum of its reservations' money.
local function holds(keys)
  local sums, reply = {}, {}
  for _, id in ipairs(call('ZRANGEBYSCORE', base .. ':l', '-inf', '(inf')) do
    local args, held = load(id)
    for _, cap in ipairs(args and args[7] or {}) do
      sums[cap[1]] = (sums[cap[1]] or 0) + held
    end
  end
  for index, key in ipairs(keys) do
    local _, held = money(call('GET', base .. ':c:' .. key))
    reply[2 * index - 1], reply[2 * index] = held, sums[key] or 0
  end
  return cmsgpack.pack(reply)
end

sweep()
local operations = {
  reserve = reserve, extend = extend, settle = settle, keep = keep, renew = renew, holds = holds,
  restore = restore, seed = seed, born = born,
}
return operations[ARGV[1]](unpack(cmsgpack.unpack(ARGV[3])))
