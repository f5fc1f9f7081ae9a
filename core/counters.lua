-- Atomic counters, one script call per operation. KEYS[1] is the group's hash tag and the prefix of
-- every other key, so a group is in one slot of a Redis Cluster. ARGV: operation, now in ms (-1: the
-- server's clock), msgpack of the arguments. Replies are msgpack.
--
--   :t:<key>  three doubles: used, carry, at  a token bucket
--   :c:<key>  two doubles: spent, held        money under a cap, nano-units
--   :s:<key>  sorted set id -> lease expiry   slots
--   :h:<id>   msgpack                         a reservation
--   :l        sorted set id -> lease expiry   leases
--
-- Each Redis command has a fixed cost, so a call reads all its values with one MGET and sets a value
-- together with its expiry. Numbers are passed as text, because Redis would format them as floats.

local base, call, fmod = KEYS[1], redis.call, math.fmod
local pack, unpacked, format = struct.pack, struct.unpack, string.format
local DAY_MS = 86400000
local RECORD_MS, RECORD = 7 * DAY_MS, '604800000'
local MARKED = '691200000' -- one day more, because the sets' expiry is extended once a day
local MONEY = '3456000000' -- 40 days
local LONGEST_MS = 1e14 -- Redis rejects an expiry that overflows its clock
local SWEEP = '100'

local now = tonumber(ARGV[2])
-- How long a bucket's key outlives its refill: an injected clock may stand still while Redis's runs.
local slack_ms = now < 0 and 1000 or RECORD_MS
if now < 0 then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local now_text = format('%d', now)

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
  local lasts = math.min(math.ceil(used / take[2] * take[3]) + slack_ms, LONGEST_MS)
  call('SET', key, pack('<ddd', used, carry, at), 'PX', format('%d', lasts))
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

local function money(raw)
  if not raw then return 0, 0 end
  return unpacked('<dd', raw)
end

local function pay(cap, spent, held)
  call('SET', base .. ':c:' .. cap[1], pack('<dd', spent, held), 'PX', MONEY)
end

-- Returns args of `reserve`, money held, answer. `args` is stored as received until it changes.
local function load(id)
  local raw = call('GET', base .. ':h:' .. id)
  if raw then return cmsgpack.unpack(raw) end
end

local function save(id, packed)
  call('SET', base .. ':h:' .. id, packed, 'PX', RECORD)
end

-- The first call of a day extends the set's expiry: only then is the day's marker (score inf) new.
local function enter(key, id, lease)
  local ends = format('%d', now + lease)
  local mark = 'day ' .. math.floor(now / DAY_MS)
  if call('ZADD', key, ends, id, 'inf', mark) < 2 then return end
  call('ZREMRANGEBYSCORE', key, 'inf', 'inf')
  call('ZADD', key, 'inf', mark)
  call('PEXPIRE', key, MARKED)
end

local function leave(id, slots)
  call('ZREM', base .. ':l', id)
  for _, slot in ipairs(slots) do call('ZREM', base .. ':s:' .. slot[1], id) end
end

-- An expired lease returns its slots and the amounts above `keep`; its money stays held.
local function sweep()
  local due = call('ZRANGEBYSCORE', base .. ':l', '-inf', now_text, 'LIMIT', '0', SWEEP)
  for _, id in ipairs(due) do
    local args, held, answer = load(id)
    if not args then
      call('ZREM', base .. ':l', id)
    else
      leave(id, args[4])
      local kept = {}
      for index, take in ipairs(args[3]) do kept[index] = math.min(take[5], take[4]) end
      change(args[3], kept, {})
      if held == 0 then
        call('DEL', base .. ':h:' .. id)
      else
        save(id, cmsgpack.pack(args, held, answer))
      end
    end
  end
end

-- args: id, lease_ms, takes, slots {key, limit, shadow}, need, want, caps {key, cap, spent}
local function reserve(id, lease, takes, slots, need, want, caps)
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
    if counts[index] >= slot[2] then
      full[#full + 1] = slot[1]
      refused = refused or not slot[3]
    end
  end
  local left, moneys, least = {}, {}, want
  for index, cap in ipairs(caps) do
    local raw = raws[#takes + 1 + index]
    local spent, held = money(raw)
    if cap[3] > spent or not raw then
      spent = math.max(spent, cap[3])
      pay(cap, spent, held)
    end
    moneys[index] = {spent, held}
    left[index] = cap[2] - spent - held
    least = math.min(least, left[index])
  end
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
    counts[index] = counts[index] + 1
    enter(base .. ':s:' .. slot[1], id, lease)
  end
  local granted = #caps > 0 and least or 0
  if granted ~= 0 then
    for index, cap in ipairs(caps) do pay(cap, moneys[index][1], moneys[index][2] + granted) end
  end
  local answer = cmsgpack.pack({1, states, counts, full, left, granted})
  if lease > 0 then
    save(id, ARGV[3] .. cmsgpack.pack(granted, answer))
    enter(base .. ':l', id, lease)
  end
  return answer
end

local function extend(id, amounts, need, want)
  local args, held, answer = load(id)
  if not args then return 0 end
  local takes, caps = args[3], args[7]
  for index, amount in ipairs(amounts) do amounts[index] = math.max(amount, takes[index][4]) end
  local moneys = change(takes, amounts, caps)
  local granted = 0
  if #caps > 0 and want > 0 then
    granted = want
    for index, cap in ipairs(caps) do
      local spent, others = money(moneys[index])
      granted = math.min(granted, cap[2] - spent - others)
    end
    if granted < math.max(need, 1) then granted = 0 end
  end
  if granted > 0 then
    for index, cap in ipairs(caps) do
      local spent, others = money(moneys[index])
      pay(cap, spent, others + granted)
    end
  end
  save(id, cmsgpack.pack(args, held + granted, answer))
  return granted
end

local function settle(id, amounts, spent)
  local args, held = load(id)
  if not args then return 0 end
  local caps = args[7]
  local moneys = change(args[3], amounts, caps)
  leave(id, args[4])
  for index, cap in ipairs(caps) do
    local before, others = money(moneys[index])
    if held ~= 0 or spent ~= 0 then pay(cap, before + spent, others - held) end
  end
  call('DEL', base .. ':h:' .. id)
  return 1
end

local function renew(ids, lease)
  for _, id in ipairs(ids) do
    local ends = call('ZSCORE', base .. ':l', id)
    local args = ends and tonumber(ends) > now and load(id)
    if args then
      enter(base .. ':l', id, lease)
      for _, slot in ipairs(args[4]) do enter(base .. ':s:' .. slot[1], id, lease) end
    end
  end
  return 1
end

sweep()
local operations = {reserve = reserve, extend = extend, settle = settle, renew = renew}
return operations[ARGV[1]](unpack(cmsgpack.unpack(ARGV[3])))
