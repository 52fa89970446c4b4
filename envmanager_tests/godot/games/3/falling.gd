extends "res://addons/envmanager/arena.gd"
# A box falls on a floor, in 3D, and is pushed about.

var ticks: int = 0
var push: Vector3 = Vector3.ZERO

onready var box: RigidBody = $"../Box"


func reset(from: RandomNumberGenerator, _options: Dictionary) -> void:
	var start = Vector3(from.randf_range(-5, 5), from.randf_range(1, 3), from.randf_range(-5, 5))
	place_3d(box, Transform(Basis(Vector3.UP, from.randf()), start), Vector3(0, -1, 0))
	push = Vector3.ZERO
	ticks = 0


func observe() -> PoolRealArray:
	var at = box.translation
	var speed = box.linear_velocity
	return PoolRealArray([at.x, at.y, at.z, speed.x, speed.y, speed.z])


func act(continuous: PoolRealArray, _discrete: PoolIntArray) -> void:
	push = Vector3(10 * continuous[0], 0, 10 * continuous[1])


func _physics_process(_delta: float) -> void:
	box.add_central_force(push)


func after_tick() -> void:
	ticks += 1
	if ticks == 60:
		end_episode(true)
